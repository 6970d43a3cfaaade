"""Values by which the rollouts of an index can be filtered, with the number of rollouts of each fate and reason."""

import sqlite3
from typing import Any

from rollstream.pipeline.index import fates


def facets(db: sqlite3.Connection) -> dict[str, Any]:
    """Return environments, workers and versions, and the numbers of rollouts by fate and by reason."""
    kinds: dict[str, list[str]] = {"environment": [], "worker": []}
    for kind, name in db.execute("select kind, name from names where kind in ('environment', 'worker') order by name"):
        kinds[kind].append(name)
    low = db.execute("select min(version) from rollouts where version is not null").fetchone()[0]
    high = db.execute("select max(version) from rollouts").fetchone()[0]
    by_fate: dict[str, int] = {}
    by_reason: dict[str, int] = {}
    counted = db.execute(
        "select fate, (select name from names where id = reason), count(*) from rollouts group by fate, reason"
    )
    for fate, reason, count in counted:
        name = fates.NAMES[fate]
        by_fate[name] = by_fate.get(name, 0) + count
        if reason:
            by_reason[reason] = by_reason.get(reason, 0) + count
    return {
        "environments": kinds["environment"],
        "workers": kinds["worker"],
        "versions": {"lowest": low, "highest": high},
        "fates": by_fate,
        "reasons": by_reason,
    }
