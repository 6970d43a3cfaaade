"""The table of rollouts during a transaction, which keeps its new rows in memory until it commits.

Each new row is written once, with its latest fate, instead of once for every change of its fate.
"""

import sqlite3
from collections.abc import Iterable, Iterator
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
