"""A view of a run, for lineage, that finds records by an index of places and reads only the records that it needs.

The index only gives the place of a record; the record itself is read from its topic, as by a view without an index.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rollstream.pipeline.audit.configuration_history import ConfigurationHistory, ConfigurationSummary, summary
from rollstream.pipeline.audit.place_index import PlaceIndex, uid_key
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.progress_bar import progress
from rollstream.pipeline.tools.plain_values import decoded
from rollstream.pipeline.tools.run_view import (
    Fate,
    RolloutPlace,
    RunView,
    SearchableRun,
    carrying_batch,
    fates_in,
    oldest_snapshot,
)
from rollstream.pipeline.tools.tabulated_run import TabulatedRun
from rollstream.topics.codec import decode_as
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import (
    JournalRecord,
    PolicyManifest,
    Rollout,
    TrainingBatch,
)


def add_index_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag --without-index."""
    parser.add_argument(
        "--without-index",
        action="store_true",
        help="read the topics from their beginning; by default, records are found by an index below data_dir, which is "
        "updated first",
    )


def index_file(config: RunConfig) -> Path:
    """Return the file of a run's index of places."""
    return config.run_dir / "places.sqlite"


@contextmanager
def view_of(config: RunConfig, args: argparse.Namespace) -> Iterator[SearchableRun]:
    """Yield a view of the run for lineage, which uses the updated index unless --without-index is given."""
    with RunView(config.kafka, config.run) as topics:
        if args.without_index:
            yield topics
            return
        with PlaceIndex(config.kafka, config.run, index_file(config)) as index:
            with progress("records") as show:
                index.update(show)
            yield LookedUpRun(index, topics)


class LookedUpRun(TabulatedRun):
    """View of one run that finds records by an index."""

    def __init__(self, index: PlaceIndex, topics: RunView) -> None:
        """`topics` reads the records."""
        super().__init__(index.run, index.db)
        self.skipped = index.skipped()
        self._topics = topics

    def places_of(self, uid: str) -> list[RolloutPlace]:
        """Places of the rollouts with a uid, in order; several if the rollout was sent repeatedly."""
        rows = self._db.execute(
            "select partition, offset from rollouts where uid = ? order by partition, offset", (uid_key(uid.encode()),)
        ).fetchall()
        places = []
        for place in (RolloutPlace(*row) for row in rows):
            with suppress(TopicError):  # The record was pruned after the index was updated.
                record = decoded(self.record("rollouts", *place).value)
                if isinstance(record, Rollout) and record.uid == uid:
                    places.append(place)
        return places

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record. Raises TopicError if it does not exist."""
        return self._topics.record(name, partition, offset)

    def fates(self, partition: int, offsets: set[int]) -> dict[int, Fate]:
        """Return the fates of these offsets of a partition."""
        row = self._db.execute("select begin, position from journals where partition = ?", (partition,)).fetchone()
        read = range(*row) if row else range(0)
        journaled = {offset: place for offset in offsets for place in self._told(partition, offset)}
        earlier = any(offset < read.start for offset in offsets - journaled.keys())
        records: dict[int, JournalRecord] = {}
        for place in sorted(set(journaled.values())):
            records |= self._transaction_from(partition, place)
        return fates_in(records.values(), read, offsets, self._oldest_snapshot(partition) if earlier else ())

    def _oldest_snapshot(self, partition: int) -> list[JournalRecord]:
        """Read the journal of a partition from its beginning to the end of its first complete snapshot."""
        topic = self._topics.topic("journal")
        with closing(read_to_end(self._topics.kafka, topic, partitions=[partition])) as messages:
            journal = SkippedRecords(logged=False).records(JournalRecord, messages)
            return oldest_snapshot(record for _message, record in journal)

    def _transaction_from(self, partition: int, place: int) -> dict[int, JournalRecord]:
        """Return the journal record at an offset and the later parts of its transaction, by offset."""
        record = decode_as(JournalRecord, self.record("journal", partition, place).value)
        records = {place: record}
        if record.part + 1 == record.parts:
            return records
        topic, start = self._topics.topic("journal"), {partition: place + 1}
        with closing(read_to_end(self._topics.kafka, topic, partitions=[partition], start=start)) as messages:
            for message, part in SkippedRecords(logged=False).records(JournalRecord, messages):
                records[message.offset] = part
                if part.part + 1 == part.parts:
                    break
        return records

    def _told(self, partition: int, offset: int) -> Iterator[int]:
        """Yield the offset of the journal record that finishes an offset of `rollouts`, if there is one."""
        row = self._db.execute(
            "select last, journal from finished where partition = ? and first <= ? order by first desc limit 1",
            (partition, offset),
        ).fetchone()
        if row is not None and offset <= row[0]:
            yield row[1]

    def configuration(self, partition: int, generation: int) -> ConfigurationSummary:
        """Return a summary of a grouping configuration from the journal of a partition."""
        row = self._db.execute("select history from journals where partition = ?", (partition,)).fetchone()
        history = ConfigurationHistory.of(json.loads(row[0])) if row else ConfigurationHistory()
        return summary([(partition, history)], generation)

    def batch_of(self, place: RolloutPlace, fate: Fate) -> TrainingBatch | None:
        """Find the batch that carries a batched record: one of the record's transaction, or an older one of its
        partition."""
        older = self._db.execute(
            "select batch from entries where partition = ? order by offset desc", (place.partition,)
        )
        return carrying_batch(self, place, fate, (name for (name,) in older))

    def policy(self, version: int) -> PolicyManifest | None:
        """Manifest of a policy version; None if it is not on record."""
        row = self._db.execute("select partition, offset from policies where version = ?", (version,)).fetchone()
        if row is None:
            return None
        try:
            return decode_as(PolicyManifest, self.record("policies", *row).value)
        except TopicError:
            return None  # The record was deleted after the index was updated.
