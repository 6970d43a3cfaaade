"""A run as lineage asks about it, looked up in an index of places: only the records that an answer needs are read.

Each record comes from the topics and is decoded here, as by a view that reads all of them; the index only finds it.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollstream.pipeline.audit.configuration_history import ConfigurationHistory, ConfigurationSummary, summary
from rollstream.pipeline.audit.place_index import PlaceIndex, uid_key
from rollstream.pipeline.audit.topic_reading import batch_at
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.progress_bar import progress
from rollstream.pipeline.tools.plain_values import decoded
from rollstream.pipeline.tools.run_view import (
    Fate,
    IndexedEntry,
    RolloutPlace,
    RunView,
    SearchableRun,
    StepUse,
    carrying_batch,
    fates_in,
)
from rollstream.topics.codec import decode_as
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import (
    BatchIndexEntry,
    JournalRecord,
    LearnerStep,
    PolicyManifest,
    Rollout,
    TrainingBatch,
)


def add_index_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that leaves the index of places out."""
    parser.add_argument(
        "--without-index",
        action="store_true",
        help="read the topics from their beginning; by default an index below data_dir finds the records, and is "
        "brought up to date first",
    )


def index_file(config: RunConfig) -> Path:
    """The file of a run's index of places."""
    return config.run_dir / "places.sqlite"


@contextmanager
def view_of(config: RunConfig, args: argparse.Namespace) -> Iterator[SearchableRun]:
    """A view of the run for lineage: by the index, brought up to date, unless the flags leave it out."""
    with RunView(config.kafka, config.run) as topics:
        if args.without_index:
            yield topics
            return
        with PlaceIndex(config.kafka, config.run, index_file(config)) as index:
            with progress("records") as show:
                index.update(show)
            yield LookedUpRun(index, topics)


class LookedUpRun:
    """View of one run that finds records by an index."""

    def __init__(self, index: PlaceIndex, topics: RunView) -> None:
        """`topics` reads the records."""
        self.run = index.run
        self.skipped = index.skipped()
        self._db, self._topics = index.db, topics

    def places_of(self, uid: str) -> list[RolloutPlace]:
        """Places of the rollouts with a uid, in order; several if it was sent more than once."""
        rows = self._db.execute(
            "select partition, offset from rollouts where uid = ? order by partition, offset", (uid_key(uid.encode()),)
        ).fetchall()
        places = []
        for place in (RolloutPlace(*row) for row in rows):
            with suppress(TopicError):  # It was pruned since.
                record = decoded(self.record("rollouts", *place).value)
                if isinstance(record, Rollout) and record.uid == uid:
                    places.append(place)
        return places

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record. Raises TopicError if it does not exist."""
        return self._topics.record(name, partition, offset)

    def moved_to(self, place: RolloutPlace) -> dict[str, str]:
        """The run that a moved record went to, and its place there, if that run still holds it."""
        return self._topics.moved_to(place)

    def fates(self, partition: int, offsets: set[int]) -> dict[int, Fate]:
        """Fates of these offsets of a partition."""
        row = self._db.execute("select begin, position from journals where partition = ?", (partition,)).fetchone()
        read = range(*row) if row else range(0)
        places = sorted({place for offset in offsets for place in self._told(partition, offset)})
        records = [self.record("journal", partition, place) for place in places]
        return fates_in([decode_as(JournalRecord, record.value) for record in records], read, offsets)

    def _told(self, partition: int, offset: int) -> Iterator[int]:
        """The offset of the journal record that finishes an offset of `rollouts`, if one does."""
        row = self._db.execute(
            "select last, journal from finished where partition = ? and first <= ? order by first desc limit 1",
            (partition, offset),
        ).fetchone()
        if row is not None and offset <= row[0]:
            yield row[1]

    def configuration(self, partition: int, generation: int) -> ConfigurationSummary:
        """A configuration of grouping in short, as the journal of a partition tells of it."""
        row = self._db.execute("select history from journals where partition = ?", (partition,)).fetchone()
        history = ConfigurationHistory.of(json.loads(row[0])) if row else ConfigurationHistory()
        return summary([(partition, history)], generation)

    def batch(self, batch_id: str) -> TrainingBatch:
        """Fetch a batch. Raises TopicError if the index does not name it."""
        indexed = self.entry(batch_id)
        if indexed is None:
            raise TopicError(f"run {self.run} has no batch {batch_id}; `rollstream cat batch-index` lists them")
        return batch_at(self.record("batches", indexed.entry.partition, indexed.entry.offset))

    def batch_of(self, place: RolloutPlace, fate: Fate) -> TrainingBatch | None:
        """Find the batch that carries a batched record: one of its transaction, or an older one of its partition."""
        older = self._db.execute(
            "select batch from entries where partition = ? order by offset desc", (place.partition,)
        )
        return carrying_batch(self, place, fate, (name for (name,) in older))

    def steps_numbered(self, number: int) -> list[LearnerStep]:
        """The steps of this number, one for each learner that came to it, in order."""
        answer = self._db.execute("select value from steps where step = ? order by learner", (number,))
        return [decode_as(LearnerStep, value) for (value,) in answer]

    def steps_before(self, version: int) -> list[LearnerStep]:
        """The steps after which a policy version was published, in order."""
        answer = self._db.execute("select value from steps where version = ? order by learner, step", (version,))
        return [decode_as(LearnerStep, value) for (value,) in answer]

    def entries_with(self, version: int) -> list[BatchIndexEntry]:
        """Entries of the batches that may hold rollouts of a policy version, in the order learners follow."""
        answer = self._db.execute(
            "select value from entries where highest >= ? and lowest <= ? order by offset", (version, version)
        )
        return [decode_as(BatchIndexEntry, value) for (value,) in answer]

    def entry(self, batch_id: str) -> IndexedEntry | None:
        """Entry of a batch; None if the index does not name it."""
        row = self._db.execute("select offset, value from entries where batch = ?", (batch_id,)).fetchone()
        return None if row is None else IndexedEntry(row[0], decode_as(BatchIndexEntry, row[1]))

    def uses_of(self, batch_id: str) -> list[StepUse]:
        """Steps that used or skipped a batch, in order."""
        answer = self._db.execute(
            "select value from uses natural join steps where batch = ? order by learner, step", (batch_id,)
        )
        steps = [decode_as(LearnerStep, value) for (value,) in answer]
        return [StepUse(step, use) for step in steps for use in step.uses if use.batch_id == batch_id]

    def policy(self, version: int) -> PolicyManifest | None:
        """Manifest of a policy version; None if it is not on record."""
        row = self._db.execute("select partition, offset from policies where version = ?", (version,)).fetchone()
        if row is None:
            return None
        try:
            return decode_as(PolicyManifest, self.record("policies", *row).value)
        except TopicError:
            return None  # It was deleted since.
