"""A run as the lineage tools see it: its tables come from the index, and only single records are read from the log."""

import sqlite3
from collections.abc import Callable

from rollstream.pipeline.audit.configuration_history import ConfigurationHistory, ConfigurationSummary, summary
from rollstream.pipeline.index import fates
from rollstream.pipeline.tools.run_view import UNREAD, Fate, RolloutPlace, carrying_batch
from rollstream.pipeline.tools.tabulated_run import TabulatedRun
from rollstream.topics.codec import decode_as
from rollstream.topics.fates import BATCHED, DROPPED
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import Drop, PolicyManifest, TrainingBatch

ReadRecord = Callable[[str, int, int], KafkaRecord]
"""Fetches the record of a topic at a partition and offset. Raises TopicError if it does not exist."""


class IndexedView(TabulatedRun):
    """Answers `show` and `lineage` for one run."""

    def __init__(self, db: sqlite3.Connection, run: str, read: ReadRecord) -> None:
        super().__init__(run, db)
        self._read = read

    def policy(self, version: int) -> PolicyManifest | None:
        """Return the manifest of a policy version, or None if it is not on record."""
        row = self._db.execute("select value from policies where version = ?", (version,)).fetchone()
        return None if row is None else decode_as(PolicyManifest, row[0])

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record. Raises TopicError if the log no longer has it."""
        return self._read(name, partition, offset)

    def fates(self, partition: int, offsets: set[int]) -> dict[int, Fate]:
        """Return the fates of these offsets according to the journal."""
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
        """Return a summary of a grouping configuration according to the journal of a partition."""
        rows = self._db.execute(
            "select generation, since, settings from configurations where partition = ? order by generation",
            (partition,),
        ).fetchall()
        history = ConfigurationHistory()
        history.generations = [(number, since) for number, since, _settings in rows if since >= 0]
        history.settings = {number: settings for number, _since, settings in rows if settings}
        return summary([(partition, history)], generation)

    def batch_of(self, place: RolloutPlace, fate: Fate) -> TrainingBatch | None:
        """Return the batch that carries a batched record, if the log still has the batch and its index entry."""
        return carrying_batch(self, place, fate, ())
