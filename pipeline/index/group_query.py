"""Queries about the groups of an index: lists, the spread of rewards, and the advantages under every estimator."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Outcomes, mean
from rollstream.pipeline.index import fates
from rollstream.pipeline.index.details import id_at
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.rollout_query import COUNTED, MOST, cursor_at, name_id, read_cursor
from rollstream.topics.errors import ConfigurationError

_ORDERS: Mapping[str, str] = {"newest": "first", "spread": "std"}
_SETTLED_MEMBERS = 2
"""Smallest number of members for which the spread of a group is meaningful."""


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Conditions that groups must meet; a condition that is None does not apply."""

    environment: str | None = None
    zero_variance: bool | None = None


# ---------------------------------------------------------------------- lists


def page(
    db: sqlite3.Connection, wanted: GroupFilter, order: str = "newest", after: str | None = None, limit: int = 100
) -> dict[str, Any]:
    """Return one page of groups, the cursor of the next page, and the number of matching groups.

    Raises ConfigurationError if the order or the cursor is invalid.
    """
    if order not in _ORDERS:
        raise ConfigurationError(f"order is {order[:40]!r}; orders are {', '.join(_ORDERS)}")
    where, values = ["g.first is not null"], list[Any]()
    if wanted.environment:
        where.append("g.environment = ?")
        values.append(name_id(db, "environment", wanted.environment))
    if wanted.zero_variance is not None:
        where.append("g.zero_variance = ?")
        values.append(int(wanted.zero_variance))
    if order == "spread":
        where.append("g.std is not null")
    limit = min(max(limit, 1), MOST)
    beyond, more_values = _beyond(order, after)
    sorting = "g.first desc" if order == "newest" else "g.std desc, g.first desc"
    rows = db.execute(
        "select g.name, (select name from names where id = g.environment), g.example, g.version, g.members, g.mean,"
        " g.std, g.lowest, g.highest, g.zero_variance, g.fate, g.time_ms, g.id, g.first from groups g"
        f" where {' and '.join([*where, *beyond])} order by {sorting} limit ?",
        (*values, *more_values, limit + 1),
    ).fetchall()
    counted = f"select count(*) from (select 1 from groups g where {' and '.join(where)} limit ?)"
    matching = int(db.execute(counted, (*values, COUNTED + 1)).fetchone()[0])
    last = rows[limit - 1] if len(rows) > limit else None
    return {
        "rows": [_row(db, row) for row in rows[:limit]],
        "next": None if last is None else cursor_at(order, last[6 if order == "spread" else 13], last[13]),
        "matching": min(matching, COUNTED),
        "matching_exact": matching <= COUNTED,
    }


def _row(db: sqlite3.Connection, row: Sequence[Any]) -> dict[str, Any]:
    name, environment, example, version, members, mean_, std, low, high, zero, fate, time_ms, number, _first = row
    places = db.execute(
        "select partition, offset from rollouts where grp = ? order by id limit ?", (number, MOST)
    ).fetchall()
    return {
        "group": name,
        "environment": environment,
        "example": example,
        "version": version,
        "size": members,
        "mean": mean_,
        "std": std,
        "min": low,
        "max": high,
        "zero_variance": bool(zero),
        "fate": fates.NAMES[fate],
        "time_ms": time_ms,
        "members": [f"{partition}:{offset}" for partition, offset in places],
    }


def _beyond(order: str, after: str | None) -> tuple[list[str], list[Any]]:
    """Return the condition for groups after a cursor."""
    if not after:
        return [], []
    value, first = read_cursor(order, after)
    if order == "newest":
        return ["g.first < ?"], [first]
    return ["(g.std < ? or (g.std = ? and g.first < ?))"], [value, value, first]


# ---------------------------------------------------------------------- spread


def spread(db: sqlite3.Connection, bins: int = 20) -> dict[str, Any]:
    """Return shares of groups without variance by version, a histogram of deviations, and counts by environment."""
    bins = min(max(bins, 1), 200)
    by_version = db.execute(
        "select version, avg(zero_variance) from groups where members >= ? and std is not null group by version",
        (_SETTLED_MEMBERS,),
    ).fetchall()
    by_environment = db.execute(
        "select (select name from names where id = environment), count(*), sum(zero_variance) from groups"
        " where members >= ? and std is not null group by environment",
        (_SETTLED_MEMBERS,),
    )
    return {
        "versions": [version for version, _share in by_version],
        "zero_variance_share": [share for _version, share in by_version],
        "histogram": _histogram(db, bins),
        "by_environment": {
            name or "": {"groups": count, "zero_variance": zeros} for name, count, zeros in by_environment
        },
    }


def _histogram(db: sqlite3.Connection, bins: int) -> dict[str, list[float]]:
    most = db.execute("select max(std) from groups where members >= ?", (_SETTLED_MEMBERS,)).fetchone()[0] or 0.0
    width = most / bins
    counts = [0.0] * bins
    bins_of_groups = db.execute(
        "select min(cast(std / ? as integer), ?) as bin, count(*) from groups"
        " where members >= ? and std is not null group by bin",
        (width or 1.0, bins - 1, _SETTLED_MEMBERS),
    )
    for number, count in bins_of_groups:
        counts[number] = count
    return {
        "edges": [width * i for i in range(bins + 1)] if width else [float(i) for i in range(bins + 1)],
        "counts": counts,
    }


# ---------------------------------------------------------------------- estimators


class _Member(NamedTuple):
    """The fields of a rollout that estimators need."""

    uid: str
    group: int
    episode: str
    branches: int
    reward: float
    sampled: int


def estimators(db: sqlite3.Connection, place: RolloutPlace) -> dict[str, Any]:
    """Return the advantages of a rollout's group under every estimator. Raises TopicError if the index has no such
    rollout.

    Estimators with a second stage over a batch use the rollout's batch, or its group if it is in no batch.
    """
    row_id = id_at(db, place)
    uid = db.execute("select uid from rollout_names where id = ?", (row_id,)).fetchone()[0]
    group, batch = db.execute("select grp, batch from rollouts where id = ?", (row_id,)).fetchone()
    if group is None:
        return {"estimators": []}
    members = _members(db, "r.batch = ?", batch) if batch is not None else _members(db, "r.grp = ?", group)
    rows = []
    for name in ESTIMATORS:
        by_uid = _advantages(members, name)
        mine = [{"uid": m.uid, "advantage": by_uid[m.uid]} for m in members if m.group == group]
        rows.append({"name": name, "advantage": by_uid.get(uid), "group": mine})
    return {"estimators": rows}


def _members(db: sqlite3.Connection, condition: str, number: int) -> list[_Member]:
    """Return the valid members in the order of the log; of two with the same uid, the first counts, as in grouping."""
    rows = db.execute(
        "select n.uid, r.grp, n.episode, n.branches, r.reward, r.sampled from rollouts r"
        f" join rollout_names n on n.id = r.id where {condition} and r.reward is not null"
        " and n.branches > 0 order by r.id",
        (number,),
    )
    members: dict[str, _Member] = {}
    for uid, group, episode, branches, reward, sampled in rows:
        members.setdefault(uid, _Member(uid, group, episode or uid, branches, reward, sampled))
    return list(members.values())


def _advantages(members: Sequence[_Member], name: str) -> dict[str, float]:
    """Return the advantage of each member by uid, with the second stage of the estimator, if any, over all members."""
    estimator = ESTIMATORS[name]
    groups: dict[int, dict[str, list[_Member]]] = {}
    for member in members:
        groups.setdefault(member.group, {}).setdefault(member.episode, []).append(member)
    by_uid: dict[str, float] = {}
    for episodes in groups.values():
        outcomes = Outcomes(
            rewards=tuple(mean([m.reward for m in branches]) for branches in episodes.values()),
            lengths=tuple(sum(m.sampled for m in branches) for branches in episodes.values()),
        )
        for branches, advantage in zip(episodes.values(), estimator.within_group(outcomes), strict=True):
            by_uid |= {m.uid: advantage for m in branches}
    if estimator.over_batch is not None:
        values = estimator.over_batch([by_uid[m.uid] for m in members], [m.sampled / m.branches for m in members])
        by_uid = {m.uid: value for m, value in zip(members, values, strict=True)}
    return {m.uid: by_uid[m.uid] / m.branches for m in members}
