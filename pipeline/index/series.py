"""Series of figures by step: metrics of a learner's steps, and figures of the rollouts that each version produced.

The x value of a version's rollouts is the step that published the version, so that both kinds share one axis. Also
queries about drops over time, and about policy versions and the components that serve them.
"""

import json
import math
import sqlite3
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rollstream.pipeline.index import fates
from rollstream.pipeline.index.ingest import BUCKET_MS
from rollstream.pipeline.index.rollout_rows import first_id_at, time_of
from rollstream.pipeline.run.component_metrics import ComponentMetrics, present
from rollstream.topics.records.fates import DROPPED

POINTS = 600
SHORT_NAMES = {
    "kl/mean": "kl",
    "entropy/mean": "entropy",
    "mismatch_kl/mean": "mismatch",
    "off_policy/staleness": "staleness",
    "perf/throughput": "tokens_per_s",
    "time/step": "step_s",
}
"""Series names of learner metrics; other metrics keep their names, except that time/STAGE becomes step_s/STAGE."""
Points = dict[int, float]
"""Values by step."""


def learners(db: sqlite3.Connection) -> list[str]:
    """Return the learners with steps on record; the learner with the most steps comes first."""
    answer = db.execute("select learner from steps group by learner order by count(*) desc, learner")
    return [name for (name,) in answer]


def series(
    db: sqlite3.Connection, learner: str | None = None, names: Sequence[str] = (), points: int = POINTS
) -> dict[str, Any]:
    """Return the series of one learner, by default the learner with the most steps: all series, or those in `names`."""
    known = learners(db)
    chosen = learner or (known[0] if known else None)
    answer = {**_of_components(db, chosen), **_by_version(db, chosen), **_trained(db, chosen)}
    wanted = [name for name in names if name in answer] if names else sorted(answer)
    most = min(max(points, 2), 10_000)
    rows = []
    for name in wanted:
        x, y = _thinned(answer[name], most)
        rows.append({"name": name, "group": group_of(name), "x": x, "y": y})
    return {"learner": chosen, "learners": known, "series": rows}


def group_of(name: str) -> str:
    """Return the name of the group of series that a chart shows together."""
    return name.partition("/")[0] if "/" in name else name


def _trained(db: sqlite3.Connection, learner: str | None) -> dict[str, Points]:
    answer: dict[str, Points] = defaultdict(dict)
    rows = db.execute("select name, step, value from step_metrics where learner = ? order by name, step", (learner,))
    for name, step, value in rows:
        if value is not None:
            answer[series_name(name)][step] = value
    return answer


def series_name(metric: str) -> str:
    """Return the name of the series of a learner's metric."""
    if metric in SHORT_NAMES:
        return SHORT_NAMES[metric]
    return f"step_s/{metric.removeprefix('time/')}" if metric.startswith("time/") else metric


def _by_version(db: sqlite3.Connection, learner: str | None) -> dict[str, Points]:
    """Return figures of the rollouts of each version, with evaluations in separate series."""
    sums: dict[str, dict[int, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    steps = steps_of_versions(db, learner)
    for version, environment, count, reward, successes, sampled, truncated in db.execute(
        "select version, (select name from names where id = environment), rollouts, reward, successes, sampled,"
        " truncated from produced"
    ):
        figures = {
            "reward/produced": reward,
            f"reward/{environment}": reward,
            f"success/{environment}": successes,
            "length/produced": sampled,
            f"length/{environment}": sampled,
            "truncated/produced": truncated,
            f"truncated/{environment}": truncated,
        }
        for name, value in figures.items() if version in steps else ():
            sums[name][steps[version]].append((value, count))
    for version, environment, count, reward, successes in db.execute(
        "select version, (select name from names where id = environment), count(*), sum(reward), sum(success)"
        " from evaluated group by version, environment"
    ):
        figures = {f"reward/evaluated/{environment}": reward, f"success/evaluated/{environment}": successes}
        for name, value in figures.items() if version in steps else ():
            sums[name][steps[version]].append((value, count))
    return {name: {step: _mean(parts) for step, parts in by_step.items()} for name, by_step in sums.items()}


def _of_components(db: sqlite3.Connection, learner: str | None) -> dict[str, Points]:
    """Return metrics by role, summed over its components; the value at a step is the mean while it was the newest."""
    steps = db.execute(
        "select time_ms, step from steps where learner = ? order by time_ms, step", (learner,)
    ).fetchall()
    times = [time_ms for time_ms, _step in steps]
    parts: dict[str, dict[int, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    summed = db.execute("select role, name, bucket, sum(value) from component_series group by role, name, bucket")
    for role, name, bucket, value in summed:
        at = bisect_right(times, (bucket + 1) * BUCKET_MS) - 1
        parts[f"{role}/{name}"][steps[at][1] if at >= 0 else 0].append((value, 1))
    return {name: {step: _mean(values) for step, values in by_step.items()} for name, by_step in parts.items()}


def _mean(parts: Iterable[tuple[float, int]]) -> float:
    values = list(parts)
    return _sum(value for value, _count in values) / sum(count for _value, count in values)


def _sum(values: Iterable[float]) -> float:
    """Return the sum, NaN if it is no number that a float can hold: the log may have rewards near the largest float."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def steps_of_versions(db: sqlite3.Connection, learner: str | None) -> dict[int, int]:
    """Return the step at which each version of a learner was published; version N without a manifest counts as step N.

    The manifest of a rollback names the step of the parameters. The rollback was made later, at the newest step.
    """
    known: dict[int, tuple[str, int]] = {}
    newest: dict[str, int] = {}
    earlier: set[tuple[str, str]] = set()
    published = db.execute("select version, learner, step, digest from policies order by version")
    for version, publisher, step, digest in published:
        if digest and (publisher, digest) in earlier:
            step = max(step, newest[publisher])
        known[version] = publisher, step
        newest[publisher] = step
        earlier.add((publisher, digest))
    sampled = db.execute("select version from produced union select version from evaluated")
    steps = {}
    for (version,) in sampled:
        publisher, step = known.get(version, (learner, version))
        if publisher == learner or learner is None or version == 0:
            steps[version] = step
    return steps


def _thinned(points: Points, most: int) -> tuple[list[int], list[float]]:
    """Return at most `most` points; each is the mean of neighboring points, placed at the last of their steps."""
    steps = sorted(points)
    each = -(-len(steps) // most) if steps else 1
    x, y = [], []
    for begin in range(0, len(steps), each):
        part = steps[begin : begin + each]
        x.append(part[-1])
        y.append(_sum(points[step] for step in part) / len(part))
    return x, y


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
