"""A run as the tools for lineage see it, answered from its index: nothing but single records is read from the log."""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from rollstream.pipeline.audit.configuration_history import ConfigurationHistory, ConfigurationSummary, summary
from rollstream.pipeline.audit.topic_reading import batch_at
from rollstream.pipeline.tools.run_view import UNREAD, Fate, RolloutPlace, StepUse
from rollstream.pipeline.ui.index import fates
from rollstream.topics.codec import decode_as
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.fates import BATCHED, DROPPED
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import BatchIndexEntry, Drop, LearnerStep, PolicyManifest, TrainingBatch

ReadRecord = Callable[[str, int, int], KafkaRecord]
"""Fetches the record of a topic at a partition and offset. Raises TopicError if there is none."""


class Moves(Protocol):
    """Tells where a record of a run that was split has gone."""

    def __call__(self, place: RolloutPlace) -> dict[str, str]: ...


class IndexedView:
    """Answers to `show` and `lineage` about one run."""

    def __init__(self, db: sqlite3.Connection, run: str, read: ReadRecord, moves: Moves) -> None:
        self.run = run
        self._db, self._read, self._moves = db, read, moves
        self.index: Mapping[str, tuple[int, BatchIndexEntry]] = _Entries(db)
        self.uses: Mapping[str, list[StepUse]] = _Uses(db, self._step)
        self.policies: Mapping[int, PolicyManifest] = _Policies(db)

    @property
    def steps(self) -> list[LearnerStep]:
        """Every step of every learner, in order."""
        answer = self._db.execute("select value from steps order by learner, step")
        return [decode_as(LearnerStep, value) for (value,) in answer]

    def _step(self, learner: str, step: int) -> LearnerStep:
        row = self._db.execute("select value from steps where learner = ? and step = ?", (learner, step)).fetchone()
        return decode_as(LearnerStep, row[0])

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record. Raises TopicError if the log holds it no more."""
        return self._read(name, partition, offset)

    def moved_to(self, place: RolloutPlace) -> dict[str, str]:
        """The run that a moved record went to, and its place there."""
        return self._moves(place)

    def fates(self, partition: int, offsets: set[int]) -> dict[int, Fate]:
        """Fates of these offsets, as the journal has them."""
        return {offset: self._fate(partition, offset) for offset in offsets}

    def _fate(self, partition: int, offset: int) -> Fate:
        row = self._db.execute(
            "select r.fate, b.name from rollouts r left join batches b on b.id = r.batch"
            " where r.partition = ? and r.offset = ?",
            (partition, offset),
        ).fetchone()
        if row is None:
            return Fate(UNREAD)
        name = fates.NAMES[row[0]]
        if name in (fates.TRAINED, fates.SKIPPED, BATCHED):
            return Fate(BATCHED, None, (row[1],) if row[1] else ())
        return self._dropped(partition, offset) if name == DROPPED else Fate(name)

    def _dropped(self, partition: int, offset: int) -> Fate:
        row = self._db.execute(
            "select reason, detail, age_ms, generation from drops where partition = ? and offset = ?",
            (partition, offset),
        ).fetchone()
        if row is None:
            return Fate(DROPPED)
        drop = Drop(offset=offset, reason=row[0], detail=row[1], age_ms=row[2])
        return Fate(DROPPED, drop, generation=row[3])

    def configuration(self, partition: int, generation: int) -> ConfigurationSummary:
        """A configuration of grouping in short, as the journal of a partition tells of it."""
        rows = self._db.execute(
            "select generation, since, settings from configurations where partition = ? order by generation",
            (partition,),
        ).fetchall()
        history = ConfigurationHistory()
        history.generations = [(number, since) for number, since, _settings in rows if since >= 0]
        history.settings = {number: settings for number, _since, settings in rows if settings}
        return summary([(partition, history)], generation)

    def batch(self, batch_id: str) -> TrainingBatch:
        """Fetch a batch. Raises TopicError if the log holds it no more."""
        row = self._db.execute("select partition, offset from batches where name = ?", (batch_id,)).fetchone()
        if row is None or row[0] is None:
            raise TopicError(f"run {self.run} has no batch {batch_id}")
        return batch_at(self.record("batches", *row))

    def batch_of(self, place: RolloutPlace, fate: Fate) -> TrainingBatch | None:
        """The batch that carries a batched record, if the log still holds it and its entry."""
        for name in fate.batch_ids:
            if name in self.index:
                try:
                    batch = self.batch(name)
                except (TopicError, RecordError):
                    continue  # The record was pruned.
                if place.offset in batch.source_offsets:
                    return batch
        return None


class _Entries(Mapping[str, tuple[int, BatchIndexEntry]]):
    """Entries of batches with their offsets, in the order learners follow."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __getitem__(self, name: str) -> tuple[int, BatchIndexEntry]:
        row = self._db.execute("select index_offset, value from entries where batch = ?", (name,)).fetchone()
        if row is None:
            raise KeyError(name)
        return row[0], decode_as(BatchIndexEntry, row[1])

    def __iter__(self) -> Iterator[str]:
        return (name for (name,) in self._db.execute("select batch from entries order by index_offset"))

    def __len__(self) -> int:
        return int(self._db.execute("select count(*) from entries").fetchone()[0])


class _Uses(Mapping[str, list[StepUse]]):
    """Steps that used or skipped a batch, by batch."""

    def __init__(self, db: sqlite3.Connection, step_of: Callable[[str, int], LearnerStep]) -> None:
        self._db, self._step_of = db, step_of

    def __getitem__(self, name: str) -> list[StepUse]:
        answer = self._db.execute(
            "select distinct learner, step from uses where batch = ? order by learner, step", (name,)
        ).fetchall()
        steps = [self._step_of(*key) for key in answer]
        if not steps:
            raise KeyError(name)
        return [StepUse(step, use) for step in steps for use in step.uses if use.batch_id == name]

    def __iter__(self) -> Iterator[str]:
        return (name for (name,) in self._db.execute("select distinct batch from uses"))

    def __len__(self) -> int:
        return int(self._db.execute("select count(distinct batch) from uses").fetchone()[0])


class _Policies(Mapping[int, PolicyManifest]):
    """Manifests by policy version."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __getitem__(self, version: int) -> PolicyManifest:
        row = self._db.execute("select value from policies where version = ?", (version,)).fetchone()
        if row is None:
            raise KeyError(version)
        return decode_as(PolicyManifest, row[0])

    def __iter__(self) -> Iterator[int]:
        return (version for (version,) in self._db.execute("select version from policies order by version"))

    def __len__(self) -> int:
        return int(self._db.execute("select count(*) from policies").fetchone()[0])
