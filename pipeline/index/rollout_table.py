"""The table of rollouts during a transaction, which keeps its new rows in memory until it commits.

Each new row is written once, with its latest fate, instead of once for every change of its fate. Figures that depend
on several rows are computed again whenever one of these has changed.
"""

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

from rollstream.pipeline.index import fates
from rollstream.pipeline.index.fates import UNREAD
from rollstream.topics.records.fates import BATCHED

Span = tuple[int, int]
"""First and last offset of a range."""


@dataclass(slots=True)
class NewRow:
    """A row of the table `rollouts` that is not written yet; its fields are the columns."""

    id: int
    partition: int
    offset: int
    time_ms: int
    environment: int | None = None
    worker: int | None = None
    version: int | None = None
    lowest: int | None = None
    highest: int | None = None
    reward: float | None = None
    length: int | None = None
    sampled: int | None = None
    truncated: int | None = None
    grp: int | None = None
    fate: int = fates.CODES[UNREAD]
    reason: int | None = None
    batch: int | None = None
    batch_row: int | None = None
    advantage: float | None = None


class RowNames(NamedTuple):
    """A row of the table `rollout_names`."""

    id: int
    uid: str | None
    example: str | None
    preview: str
    episode: str | None
    branches: int | None


_COLUMNS = tuple(field.name for field in fields(NewRow))
_values = attrgetter(*_COLUMNS)
_INSERT = f"insert or ignore into rollouts ({', '.join(_COLUMNS)}) values ({', '.join('?' * len(_COLUMNS))})"
_SETTLE = "update rollouts set fate = ?, reason = ? where partition = ? and offset between ? and ? and fate <= ?"
_ASSIGN = "update rollouts set batch = ?, batch_row = ?, advantage = ? where partition = ? and offset = ?"


class RolloutTable:
    """The rows of rollouts, written and new. The owner of the connection begins and commits the transactions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._new: dict[int, dict[int, NewRow]] = {}
        """New rows by partition and offset. Offsets rise, so every written row precedes the first new row."""
        self._names: list[RowNames] = []
        self._texts: list[tuple[int, str]] = []
        self.touched: set[int] = set()
        """Groups with a row that changed in this transaction."""

    def forget(self) -> None:
        """Forget the changes of a transaction that was rolled back."""
        self._new.clear()
        self._names.clear()
        self._texts.clear()
        self.touched.clear()

    def add(self, row: NewRow, names: RowNames, text: str) -> None:
        """Add the row of a record, whose offset is higher than all earlier offsets of its partition."""
        self._new.setdefault(row.partition, {}).setdefault(row.offset, row)
        self._names.append(names)
        if text:
            self._texts.append((row.id, text))
        if row.grp is not None:
            self.touched.add(row.grp)

    def settle(self, partition: int, spans: Iterable[Span], fate: int, reason: int | None, among: int) -> None:
        """Set the fate of these offsets, except where the current fate has a higher code than `among`."""
        written = []
        for first, last in spans:
            for row in self._between(partition, first, last):
                if row.fate <= among:
                    row.fate, row.reason = fate, reason
            if (end := self._end_of_written(partition, last)) >= first:
                written.append((first, end))
        self._db.executemany(_SETTLE, [(fate, reason, partition, *span, among) for span in written])
        for span in written:
            answer = self._db.execute(
                "select distinct grp from rollouts where partition = ? and offset between ? and ? and grp is not null",
                (partition, *span),
            )
            self.touched.update(group for (group,) in answer)

    def assign(self, batch: int, partition: int, advantages: Iterable[tuple[int, float | None]]) -> None:
        """Make rollouts the rows of a batch; `advantages` has the offset and the advantage of each rollout.

        Rollouts whose fate was in a pruned part of the journal count as batched from now on.
        """
        new = self._new.get(partition, {})
        settled, batched = fates.CODES[fates.SETTLED], fates.CODES[BATCHED]
        written = []
        for number, (offset, advantage) in enumerate(advantages):
            row = new.get(offset)
            if row is None:
                written.append((batch, number, advantage, partition, offset))
                continue
            row.batch, row.batch_row, row.advantage = batch, number, advantage
            if row.fate == settled:
                row.fate = batched
        if written:
            self._db.executemany(_ASSIGN, written)
            self._db.execute("update rollouts set fate = ? where batch = ? and fate = ?", (batched, batch, settled))

    def write(self) -> None:
        """Write the new rows without their texts, which `write_texts` writes."""
        rows = sorted((row for rows in self._new.values() for row in rows.values()), key=attrgetter("id"))
        written = self._db.executemany(_INSERT, map(_values, rows)).rowcount
        self._db.execute("update row_count set rows = rows + ?", (max(written, 0),))
        self._db.executemany("insert or ignore into rollout_names values (?, ?, ?, ?, ?, ?)", sorted(self._names))
        self._new.clear()
        self._names.clear()

    def write_texts(self) -> None:
        """Write the texts of new rows, right before the transaction commits.

        Inserting texts in the order of their ids is much faster. SQLite keeps new texts in memory only until a
        statement changes several rows of another table, so they are written last.
        """
        self._db.executemany("insert into texts (rowid, text) values (?, ?)", sorted(self._texts))
        self._texts.clear()

    def _between(self, partition: int, first: int, last: int) -> Iterator[NewRow]:
        """Yield the new rows of these offsets."""
        rows = self._new.get(partition)
        if rows:
            for offset in range(max(first, next(iter(rows))), min(last, next(reversed(rows))) + 1):
                if offset in rows:
                    yield rows[offset]

    def _end_of_written(self, partition: int, last: int) -> int:
        """Return the last offset, at most `last`, whose row may be written already."""
        rows = self._new.get(partition)
        return min(last, next(iter(rows)) - 1) if rows else last


_TRAINED, _SKIPPED, _BATCHED = (fates.CODES[name] for name in (fates.TRAINED, fates.SKIPPED, "batched"))
_UPDATE_GROUP = """update groups set members = ?, mean = ?, std = ?, lowest = ?, highest = ?, zero_variance = ?,
    fate = ?, time_ms = ?, first = ? where id = ?"""
_UPDATE_ROLLOUT = """update rollouts set fate = ?, step = ?, reason = ? where id = ?
    and (fate is not ? or step is not ? or reason is not ?)"""


class _Use(NamedTuple):
    """A step's use of one row of a batch."""

    trained: int
    step: int
    reason: str


def update_groups(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Compute the figures of groups from their members."""
    rows = []
    for number in sorted(numbers):
        answer = connection.execute(
            "select reward, fate, time_ms, id from rollouts where grp = ?", (number,)
        ).fetchall()
        members = sorted(answer, key=lambda row: row[3])
        if not members:
            continue
        rewards = [row[0] for row in members if row[0] is not None]
        count = len(rewards)
        mean = math.fsum(rewards) / count if count else None
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / count) if mean is not None else None
        low, high = min(rewards, default=None), max(rewards, default=None)
        fate = _fate_of_most([row[1] for row in members])
        when = members[0][2], members[0][3]
        rows.append((len(members), mean, std, low, high, int(count > 1 and low == high), fate, *when, number))
    connection.executemany(_UPDATE_GROUP, rows)


def _fate_of_most(codes: list[int]) -> int:
    """Return the most frequent fate of the members; among equally frequent fates, the one with the highest number."""
    counts = Counter(codes)
    return max(counts, key=lambda code: (counts[code], code))


def update_uses(connection: sqlite3.Connection, batch: str, name: Callable[[str, str], int]) -> set[int]:
    """Update the fates of a batch's rollouts from the steps that used them; return the groups of these rollouts.

    A rollout that any step of any learner trained on counts as trained at the first of these steps.
    """
    answer = connection.execute("select id from batches where name = ?", (batch,)).fetchone()
    members = connection.execute(
        "select id, batch_row, fate, grp from rollouts where batch = ?", answer or (None,)
    ).fetchall()
    if not members:
        return set()
    uses = _uses_by_row(connection, batch, [row for _id, row, _fate, _group in members])
    changes: list[tuple[int | None, ...]] = []
    for row_id, row, fate, _group in members:
        use = uses.get(row)
        if use is not None:
            reason = name("reason", use.reason) if use.reason else None
            change: tuple[int | None, ...]
            change = (_TRAINED, use.step, None) if use.trained else (_SKIPPED, use.step, reason)
        elif fate in (_TRAINED, _SKIPPED):
            change = (_BATCHED, None, None)
        else:
            continue
        changes.append((*change, row_id, *change))
    connection.executemany(_UPDATE_ROLLOUT, changes)
    return {group for _id, _row, _fate, group in members if group is not None}


def _uses_by_row(connection: sqlite3.Connection, batch: str, rows: list[int]) -> dict[int, _Use]:
    """Return the use that counts for each row: the first that trained on the row, else the first that skipped it."""
    answer = connection.execute(
        "select trained, step, reason, row_numbers from uses where batch = ?"
        " order by trained desc, step, learner, part",
        (batch,),
    )
    uses: dict[int, _Use] = {}
    for trained, step, reason, numbers in answer:
        for row in json.loads(numbers) or rows:
            uses.setdefault(row, _Use(trained, step, reason))
    return uses
