"""Queries about drops over time, and about policy versions and the components that serve them."""

import json
import sqlite3
import time
from typing import Any

from rollstream.pipeline.index import fates
from rollstream.pipeline.index.rollout_rows import first_id_at, time_of
from rollstream.pipeline.run.component_metrics import ComponentMetrics, present
from rollstream.topics.records.fates import DROPPED

SERVERS = ("infer", "serve-weights", "engine")
"""Roles whose components sample with a policy version."""


def drops(db: sqlite3.Connection, buckets: int = 120) -> dict[str, Any]:
    """Return the numbers of dropped rollouts by reason, in buckets of their append time."""
    buckets = min(max(buckets, 1), 2000)
    first, last = db.execute("select min(id), max(id) from rollouts").fetchone()
    if first is None:
        return {"edges_ms": [], "reasons": {}, "totals": {}}
    begin, end = time_of(first), time_of(last) + 1
    width = max(-(-(end - begin) // buckets), 1)
    buckets = -(-(end - begin) // width)
    reasons: dict[str, list[int]] = {}
    # Ids rise with the append time, so a bucket is a range of ids.
    counted = db.execute(
        "select (select name from names where id = reason), (id - ?) / ?, count(*) from rollouts where fate = ?"
        " group by 1, 2",
        (first_id_at(begin), first_id_at(begin + width) - first_id_at(begin), fates.CODES[DROPPED]),
    )
    for reason, bucket, count in counted:
        reasons.setdefault(reason or "", [0] * buckets)[min(bucket, buckets - 1)] += count
    return {
        "edges_ms": [begin + width * i for i in range(buckets + 1)],
        "reasons": reasons,
        "totals": {reason: sum(counts) for reason, counts in reasons.items()},
    }


def weights(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the policy versions, newest first, and the version that each serving component uses.

    Components that ended or fell silent are left out while others of their role still serve.
    """
    names = ("version", "learner", "step", "kind", "bytes", "created_ms", "digest", "seconds")
    rows = db.execute(f"select {', '.join(names)} from policies order by version desc")
    servers = [
        ComponentMetrics(component=component, role=role, timestamp=time_ms / 1000, values=json.loads(values))
        for component, role, time_ms, values in db.execute(
            'select component, role, time_ms, "values" from components order by component'
        )
        if role in SERVERS
    ]
    versions = {each.component: each.values.get("policy_version") for each in present(servers, time.time())}
    return {
        "versions": [dict(zip(names, row, strict=True)) for row in rows],
        "serving": {component: int(version) for component, version in versions.items() if version is not None},
    }
