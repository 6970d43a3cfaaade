"""Lists of rollouts: filters, orders and pages, over the tables of an index.

Every value is a parameter of its statement. A query walks the index of its order if enough of the first rows match. If
few match, it uses the filter that leaves the fewest rows.
"""

import base64
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rollstream.pipeline.index import fates
from rollstream.pipeline.index.places import uid_key
from rollstream.topics.errors import ConfigurationError

Order = Literal["newest", "oldest", "reward", "length", "advantage"]
ORDERS: Mapping[str, tuple[str, str]] = {
    "newest": ("id", "desc"),
    "oldest": ("id", "asc"),
    "reward": ("reward", "desc"),
    "length": ("length", "desc"),
    "advantage": ("advantage", "desc"),
}
MOST = 1000
"""Maximum number of rows of a page."""
COUNTED = 10_000
"""Maximum number of matching rows that are counted."""
_WALKED = 20_000
"""Maximum number of rows that a query checks in the list's order before it starts from the filters instead."""
_LEAST_TEXT = 3
LARGEST = 2**63 - 1
"""Largest integer that SQLite accepts."""
_COLUMNS = (
    "id", "partition", "offset", "time_ms", "environment", "worker", "version", "lowest", "highest", "reward", "length",
    "sampled", "truncated", "fate", "reason", "batch", "step", "advantage", "grp",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """Conditions that rollouts must meet; a condition that is None or empty does not apply."""

    environment: str | None = None
    version: int | None = None
    version_min: int | None = None
    version_max: int | None = None
    worker: str | None = None
    fate: str | None = None
    """One fate, or several, separated by commas."""
    reason: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    example: str | None = None
    group: str | None = None
    batch: str | None = None
    step: int | None = None
    uid: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class _Condition:
    sql: str
    values: tuple[Any, ...]


class _Window(NamedTuple):
    """Number of rows to return, which is one more than the page has, and number of rows to skip before them."""

    rows: int
    skip: int


_MARKED = (fates.CODES["control"],)
_BY_UID = """id in (
    select r.id from places p join rollouts r on r.partition = p.partition and r.offset = p.offset
    join rollout_names n on n.id = r.id where p.uid = ? and n.uid = ?
)"""
_NO_MARKS = _Condition("fate <> ?", _MARKED)
"""Condition that leaves out marks and cancellations: of lists without any other condition, and of those by version,
because marks have a version, too."""


def page(
    db: sqlite3.Connection,
    wanted: RolloutFilter,
    order: str = "newest",
    after: str | None = None,
    limit: int = 100,
    skip: int = 0,
) -> dict[str, Any]:
    """Return one page of rollouts, the cursor of the next page, and how many rollouts match. Raises ConfigurationError.

    The page begins `skip` rows after the cursor `after`, so any part of a list can be read without the rows before it.
    """
    column, direction = _order_of(order)
    conditions = _conditions(db, wanted)
    valued = [] if column == "id" else [_Condition(f"{column} is not null", ())]
    limit = min(max(limit, 1), MOST)
    window = _Window(limit + 1, bounded(max(skip, 0)) or 0)
    start = valued + _after(column, direction, order, after)
    sorting = f"id {direction}" if column == "id" else f"{column} {direction}, id {direction}"
    if wanted.text:
        match = phrase(wanted.text)
        known = _matches(db, match, conditions + valued)
        matching, exact = min(len(known), COUNTED), len(known) <= COUNTED
        if exact:
            ids = _sorted(db, known, start, sorting, window)
        else:
            ids = _searched(db, match, conditions, start, sorting, window)
    else:
        ids = _ids(db, conditions or [_NO_MARKS], start, sorting, window)
        matching, exact = _count(db, conditions + valued)
    rows = rows_of(db, ids[:limit])
    more = len(ids) > limit
    return {
        "rows": rows,
        "next": cursor_at(order, _value(db, column, ids[limit - 1]), ids[limit - 1]) if more else None,
        "matching": matching,
        "matching_exact": exact,
    }


def _order_of(order: str) -> tuple[str, str]:
    if order not in ORDERS:
        raise ConfigurationError(f"order is {order[:40]!r}; orders are {', '.join(ORDERS)}")
    return ORDERS[order]


# ---------------------------------------------------------------------- conditions


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


def _conditions(db: sqlite3.Connection, wanted: RolloutFilter) -> list[_Condition]:
    """Return conditions on the table `rollouts`; filters that are likely to leave the fewest rows come first."""
    answer = [*_conditions_by_name(db, wanted)]
    if wanted.step is not None:
        answer.append(_Condition("step = ?", (bounded(wanted.step),)))
    if wanted.fate:
        names = wanted.fate.split(",")
        if not fates.CODES.keys() >= {*names}:
            raise ConfigurationError(f"fate is {wanted.fate[:40]!r}; fates are {', '.join(fates.NAMES)}")
        marks = ", ".join("?" * len({*names}))
        answer.append(_Condition(f"fate in ({marks})", tuple(sorted({fates.CODES[name] for name in names}))))
    if wanted.version is not None:
        answer.append(_Condition("version = ?", (bounded(wanted.version),)))
    ranges = (
        ("version >= ?", bounded(wanted.version_min)),
        ("version <= ?", bounded(wanted.version_max)),
        ("reward >= ?", wanted.reward_min),
        ("reward <= ?", wanted.reward_max),
    )
    answer += [_Condition(sql, (value,)) for sql, value in ranges if value is not None]
    by_version = any(value is not None for value in (wanted.version, wanted.version_min, wanted.version_max))
    return [*answer, _NO_MARKS] if by_version and not wanted.fate else answer


def _conditions_by_name(db: sqlite3.Connection, wanted: RolloutFilter) -> list[_Condition]:
    answer = []
    if wanted.uid:
        answer.append(_Condition(_BY_UID, (uid_key(wanted.uid.encode()), wanted.uid)))
    if wanted.example:
        answer.append(_Condition("id in (select id from rollout_names where example = ?)", (wanted.example,)))
    for column, table, name in (("grp", "groups", wanted.group), ("batch", "batches", wanted.batch)):
        if name:
            row = db.execute(f"select id from {table} where name = ?", (name,)).fetchone()
            answer.append(_Condition(f"{column} = ?", (row[0] if row else -1,)))
    for kind, name in (("environment", wanted.environment), ("worker", wanted.worker), ("reason", wanted.reason)):
        if name is not None and name != "":
            answer.append(_Condition(f"{kind} = ?", (name_id(db, kind, name),)))
    return answer


def name_id(db: sqlite3.Connection, kind: str, name: str) -> int:
    """Return the number of a name, or -1 if the index does not have this name."""
    row = db.execute("select id from names where kind = ? and name = ?", (kind, name)).fetchone()
    return int(row[0]) if row else -1


def bounded(value: int | None) -> int | None:
    """Return a number limited to the integers that SQLite accepts; no row has a value at these limits."""
    return None if value is None else max(-LARGEST, min(value, LARGEST))


def phrase(text: str) -> str:
    """Return a text as a quoted phrase for FTS5. Raises ConfigurationError if it is too short."""
    text = text.replace("\0", " ")
    if len(text) < _LEAST_TEXT:
        raise ConfigurationError(f"text is {text!r}; give at least {_LEAST_TEXT} characters to search for")
    return '"' + text.replace('"', '""') + '"'


# ---------------------------------------------------------------------- pages


def _ids(
    db: sqlite3.Connection, conditions: Sequence[_Condition], start: Sequence[_Condition], sorting: str, window: _Window
) -> list[int]:
    """Return the ids of a page in order. Only the first rows of the order are read if enough of these match."""
    if conditions and not window.skip:
        where, values = _joined(start)
        walk = f"select * from rollouts where {where} order by {sorting} limit ?"
        matching, more = _joined(conditions)
        statement = f"select id from ({walk}) where {matching} order by {sorting} limit ?"
        ids = [row[0] for row in db.execute(statement, (*values, _WALKED, *more, window.rows))]
        if len(ids) == window.rows:
            return ids
    where, values = _joined([*conditions, *start])
    answer = db.execute(
        f"select id from rollouts where {where} order by {sorting} limit ? offset ?", (*values, *window)
    )
    return [row[0] for row in answer]


def _joined(conditions: Sequence[_Condition]) -> tuple[str, list[Any]]:
    """Join conditions with "and"; return the result and its values."""
    return " and ".join(c.sql for c in conditions) or "1", [value for c in conditions for value in c.values]


_SEARCH = "from texts t cross join rollouts r on r.id = t.rowid where t.texts match ? and"
"""Forces SQLite to read texts in the order of ids and to check each match against the other conditions."""


def _searched(
    db: sqlite3.Connection,
    match: str,
    conditions: Sequence[_Condition],
    start: Sequence[_Condition],
    sorting: str,
    window: _Window,
) -> list[int]:
    """Return the ids of a page of rollouts that match a text, for a text that many match. Except in the order of time,
    only the newest `COUNTED` matches are sorted."""
    if sorting.startswith("id "):
        places = [_Condition(f"t.row{condition.sql}", condition.values) for condition in start]
        where, values = _joined([*conditions, *places])
        statement = f"select t.rowid {_SEARCH} {where} order by t.row{sorting} limit ? offset ?"
        return [row[0] for row in db.execute(statement, (match, *values, *window))]
    where, values = _joined(conditions)
    beyond, more = _joined(start)
    newest = f"select r.* {_SEARCH} {where} order by t.rowid desc limit ?"
    statement = f"select id from ({newest}) where {beyond} order by {sorting} limit ? offset ?"
    return [row[0] for row in db.execute(statement, (match, *values, COUNTED, *more, *window))]


def _matches(db: sqlite3.Connection, match: str, conditions: Sequence[_Condition]) -> list[int]:
    """Return the oldest rollouts whose text matches, at most `COUNTED` + 1 of them.

    One search serves the count and the page, because searching a rare phrase of common letters must check most texts.
    """
    if conditions:
        where, values = _joined(conditions)
        statement = f"select t.rowid {_SEARCH} {where} limit ?"
    else:
        statement, values = "select rowid from texts where texts match ? limit ?", []
    return [row[0] for row in db.execute(statement, (match, *values, COUNTED + 1))]


def _sorted(
    db: sqlite3.Connection, ids: Sequence[int], start: Sequence[_Condition], sorting: str, window: _Window
) -> list[int]:
    """Return the page that a window selects from the rollouts with these ids."""
    where, values = _joined(start)
    statement = (
        f"select id from rollouts where id in ({', '.join('?' * len(ids))}) and {where} order by {sorting}"
        " limit ? offset ?"
    )
    return [row[0] for row in db.execute(statement, (*ids, *values, *window))]


def _count(db: sqlite3.Connection, conditions: Sequence[_Condition]) -> tuple[int, bool]:
    """Return the number of matching rows, up to `COUNTED`, and whether it is exact."""
    if not conditions:
        marks = "select count(*) from rollouts where fate = ?"
        count, marked = db.execute(f"select rows, ({marks}) from row_count", _MARKED).fetchone()
        return int(count - marked), True
    where = " and ".join(c.sql for c in conditions)
    values = [value for c in conditions for value in c.values]
    statement = f"select count(*) from (select 1 from rollouts where {where} limit ?)"
    count = int(db.execute(statement, (*values, COUNTED + 1)).fetchone()[0])
    return min(count, COUNTED), count <= COUNTED


def _value(db: sqlite3.Connection, column: str, row_id: int) -> float:
    value: float = db.execute(f"select {column} from rollouts where id = ?", (row_id,)).fetchone()[0]
    return value


def _after(column: str, direction: str, order: str, after: str | None) -> list[_Condition]:
    """Return the condition for rows after a cursor."""
    if not after:
        return []
    value, row_id = read_cursor(order, after)
    sign = "<" if direction == "desc" else ">"
    if column == "id":
        return [_Condition(f"id {sign} ?", (row_id,))]
    return [_Condition(f"({column}, id) {sign} (?, ?)", (value, row_id))]


def cursor_at(order: str, value: float, row_id: int) -> str:
    """Return the cursor after a row of a list; `value` is what the list is ordered by, and then by ids."""
    return base64.urlsafe_b64encode(json.dumps([order, value, row_id]).encode()).decode().rstrip("=")


def read_cursor(order: str, cursor: str) -> tuple[float, int]:
    """Return value and id of a cursor. Raises ConfigurationError if it does not belong to a list of this order."""
    try:
        padded = cursor.encode() + b"=" * (-len(cursor) % 4)
        of_order, value, row_id = json.loads(base64.urlsafe_b64decode(padded))
        known = of_order == order and type(row_id) is int and isinstance(value, int | float)
        known = known and abs(row_id) <= LARGEST and abs(value) <= LARGEST
    except (ValueError, TypeError, RecursionError):
        known = False
    if not known:
        raise ConfigurationError(f"cursor {cursor[:40]!r} does not belong to this list; begin again without it")
    return value, row_id


# ---------------------------------------------------------------------- rows


def rows_of(db: sqlite3.Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of a list, in the order of `ids`."""
    statement = f"""
        select {", ".join(f"r.{name}" for name in _COLUMNS)}, n.uid, n.example, n.preview,
               e.name, w.name, x.name, b.name, g.name
        from rollouts r join rollout_names n on n.id = r.id
        left join names e on e.id = r.environment left join names w on w.id = r.worker
        left join names x on x.id = r.reason left join batches b on b.id = r.batch left join groups g on g.id = r.grp
        where r.id = ?"""
    return [_row(db.execute(statement, (row_id,)).fetchone()) for row_id in ids]


def _row(values: Sequence[Any]) -> dict[str, Any]:
    plain = dict(zip(_COLUMNS, values, strict=False))
    uid, example, preview, environment, worker, reason, batch, group = values[len(_COLUMNS) :]
    return {
        "place": f"{plain['partition']}:{plain['offset']}",
        "time_ms": plain["time_ms"],
        "uid": uid,
        "environment": environment,
        "example": example,
        "version": plain["version"],
        "lowest_version": plain["lowest"],
        "highest_version": plain["highest"],
        "worker": worker,
        "reward": plain["reward"],
        "length": plain["length"],
        "sampled": plain["sampled"],
        "truncated": None if plain["truncated"] is None else bool(plain["truncated"]),
        "fate": fates.NAMES[plain["fate"]],
        "reason": reason,
        "batch": batch,
        "step": plain["step"],
        "advantage": plain["advantage"],
        "group": group,
        "preview": preview,
    }
