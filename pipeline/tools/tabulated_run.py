"""A base class for views of a run whose entries, steps and uses of batches are in tables of SQLite.

A subclass provides a database with the tables `entries` (batch, offset, lowest, highest, value), `steps` (learner,
step, version, value) and `uses` (batch, learner, step), in which `value` is the record's value on its topic. It also
defines the queries that need other tables, or single records of the log.
"""

import sqlite3
from collections.abc import Iterable

from rollstream.pipeline.audit.topic_reading import batch_at
from rollstream.pipeline.tools.run_view import IndexedEntry, StepUse
from rollstream.topics.codec import decode_as
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import BatchIndexEntry, LearnerStep, PolicyManifest, TrainingBatch


class TabulatedRun:
    """Answers queries from the tables of entries, steps and uses."""

    def __init__(self, run: str, db: sqlite3.Connection) -> None:
        self.run = run
        self._db = db

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record; subclasses define it. Raises TopicError if it does not exist."""
        raise NotImplementedError

    def entry(self, batch_id: str) -> IndexedEntry | None:
        """Entry of a batch; None if the index does not name it."""
        row = self._db.execute("select offset, value from entries where batch = ?", (batch_id,)).fetchone()
        return None if row is None else IndexedEntry(row[0], decode_as(BatchIndexEntry, row[1]))

    def entries_with(self, version: int) -> list[BatchIndexEntry]:
        """Entries of the batches that may hold rollouts of a policy version, in the order that learners follow."""
        answer = self._db.execute(
            "select value from entries where highest >= ? and lowest <= ? order by offset", (version, version)
        )
        return [decode_as(BatchIndexEntry, value) for (value,) in answer]

    def batch(self, batch_id: str) -> TrainingBatch:
        """Fetch a batch. Raises TopicError if the index does not name it, or if it is no longer on the log."""
        indexed = self.entry(batch_id)
        if indexed is None:
            raise TopicError(f"run {self.run} has no batch {batch_id}; `rollstream cat batch-index` lists them")
        return batch_at(self.record("batches", indexed.entry.partition, indexed.entry.offset))

    def uses_of(self, batch_id: str) -> list[StepUse]:
        """Steps that used or skipped a batch, in order."""
        steps = self._steps("(learner, step) in (select learner, step from uses where batch = ?)", batch_id)
        return [StepUse(step, use) for step in steps for use in step.uses if use.batch_id == batch_id]

    def steps_numbered(self, number: int) -> list[LearnerStep]:
        """Steps with this number, one for each learner that has such a step, in order."""
        return self._steps("step = ?", number)

    def steps_before(self, manifest: PolicyManifest) -> list[LearnerStep]:
        """Steps that made the parameters of a policy version, in order; for a rollback, the step of its source."""
        condition = "version = ? or (learner = ? and step = ?)"
        return self._steps(condition, manifest.version, manifest.learner, manifest.step)

    def _steps(self, condition: str, *values: str | int) -> list[LearnerStep]:
        answer: Iterable[tuple[bytes]] = self._db.execute(
            f"select value from steps where {condition} order by learner, step", values
        )
        return [decode_as(LearnerStep, value) for (value,) in answer]
