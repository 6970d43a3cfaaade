"""Archiver: reads the topics of a run from the archived positions to their present ends, once or repeatedly.

Topics that refer to other topics are read first, so that the archive of a live run is complete: it holds every record
that the archived journal and steps name.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rollstream.consumers.archive.manifest import ArchiveManifest, arrays_folder
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter, TopicPartitionKey
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError, RecordError
from rollstream.topics.files.stored_arrays import StoredArrays, names_in
from rollstream.topics.files.stores import Store
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import UNREADABLE, GroupPosition, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import PRUNED, topic_name

logger = logging.getLogger(__name__)
TOPICS = (
    "steps",
    "policies",
    "tokenizers",
    "control",
    "metrics",
    "journal",
    "batch-index",
    "batches",
    "dead-letters",
    "evals",
    "trajectories",
    "unlabelled",
    "calls",
    "rescores",
    "rollouts",
    "samples",
)
"""All topics except `weights`, whose records are large and soon deleted; `rollstream weights export` keeps models."""
FLUSH_BYTES = 64 * 1024 * 1024
_TIMEOUT_S = 60.0


def group_of(run: str) -> str:
    """Return the consumer group in which an archiver commits its positions, for `rollstream prune`."""
    return f"{run}.archive"


@dataclass(frozen=True)
class ArchiveProgress:
    """Result of one pass."""

    records: int
    """Number of records added to the archive."""
    manifest: ArchiveManifest


class _TopicReader:
    """Reads one topic from the archive's positions."""

    def __init__(
        self, kafka: KafkaConfig, reader: Reader, run: str, topic: str, topic_id: str, writer: ArchiveWriter
    ) -> None:
        """`reader` is shared by all topics, which are read one after another."""
        self.topic = topic
        self._kafka, self._reader, self._name = kafka, reader, topic_name(run, topic)
        begins = {p: begin for p, (begin, _end) in reader.bounds(self._name).items()}
        self.position = writer.begin(topic, topic_id, begins)
        """First offset that has not been read yet, by partition."""

    def read(self, take: Callable[[KafkaRecord], None]) -> None:
        """Call `take` with every record up to the present end of the topic."""
        ends = {p: end for p, (_begin, end) in self._reader.bounds(self._name, self.position).items()}
        behind = {(self._name, p): self.position[p] for p, end in ends.items() if self.position[p] < end}
        if not behind:
            return
        self._reader.assign(behind)
        try:
            self._read_to(ends, take)
        finally:
            # An assigned client goes on fetching between the passes, and what it fetches then is thrown away.
            self._reader.unassign()

    def _read_to(self, ends: Mapping[int, int], take: Callable[[KafkaRecord], None]) -> None:
        """Call `take` with every assigned record up to these ends."""
        deadline = time.monotonic() + _TIMEOUT_S
        while any(self.position[p] < end for p, end in ends.items()):
            polled = self._reader.poll(500, 0.05)
            for record in polled.records:
                # Advance only now: `take` may commit positions, and later records have not been read yet.
                self.position[record.partition] = record.offset + 1
                take(record)
            for (_topic, partition), end in polled.ends.items():
                # Also moves past ends of transactions and aborted records.
                self.position[partition] = max(self.position[partition], end)
            if polled.records or polled.ends:
                deadline = time.monotonic() + _TIMEOUT_S
            elif time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"{self._name} returned no record for {_TIMEOUT_S:g} s, but ends at {ends}; is the broker at "
                    f"{self._kafka.bootstrap_servers} down?"
                )

    def positions(self, position: Mapping[int, int]) -> Iterator[GroupPosition]:
        """Yield the positions of the archive as the broker keeps them."""
        return (GroupPosition(self._name, p, at) for p, at in position.items())


class Archiver(Closing):
    """Archives a run to a store.

    Raises StateRefused if archive and topics do not belong together, and StoreError if the store cannot be used.
    """

    def __init__(
        self, kafka: KafkaConfig, run: str, store: Store, *, arrays: bool = False, flush_bytes: int = FLUSH_BYTES
    ) -> None:
        clients.check_broker(kafka)
        self._kafka, self._run = kafka, run
        self._flush_bytes = flush_bytes
        self._passes = 0
        self._on_record = False
        """Whether this archiver has committed its positions to the broker."""
        # The writer comes first: if the store cannot be used, no client is left that nobody closes.
        self.writer = ArchiveWriter(store, run, arrays=arrays)
        self._arrays = ArchivedArrays(kafka, run, store)
        self._reader = Reader(kafka, fetch_wait_ms=10, group=group_of(run), doing="archiving")
        self._sources: list[_TopicReader] = []
        try:
            for topic, topic_id in self._topic_ids().items():
                self._sources.append(_TopicReader(kafka, self._reader, run, topic, topic_id, self.writer))
        except BaseException:
            self.close()
            raise
        event(logger, "archive_opened", run=run, store=store.url, swept=self.writer.swept)

    def close(self) -> None:
        """Close the writer and the consumer; records that were not committed are not in the archive."""
        self.writer.close()
        self._reader.close()

    def once(self) -> ArchiveProgress:
        """Archive all present records.

        Raises Fenced if another process archives this run to the same place, and StateRefused if a topic was deleted
        and created again since the last pass.
        """
        records = 0
        if self._passes:
            # Otherwise records of the new topic would follow those of the old one.
            for topic, topic_id in self._topic_ids().items():
                self.writer.check_topic(topic, topic_id)
        self._passes += 1
        for source in self._sources:

            def take(message: KafkaRecord, topic: str = source.topic) -> None:
                nonlocal records
                records += 1
                # The arrays come first: whoever reads the record finds them.
                with self.writer.skipped.passing(message):
                    self._arrays.add(message.value)
                self.writer.add(archived_record(message, topic, self.writer.skipped))
                if self.writer.buffered_bytes >= self._flush_bytes:
                    # Files are written while further records are read.
                    self.writer.start(self._positions())
                    self._commit_positions()

            source.read(take)
        if records or self._positions() != self._archived():
            self.writer.commit(self._positions())
            self._commit_positions()
        elif not self._on_record:
            # Brokers may have forgotten the positions.
            self._commit_positions()
        self.writer.compact(gradually=True)
        return ArchiveProgress(records, self.writer.manifest)

    def _topic_ids(self) -> dict[str, str]:
        ids = topic_admin.topic_ids(self._kafka, [topic_name(self._run, topic) for topic in TOPICS])
        return {topic: ids[topic_name(self._run, topic)] for topic in TOPICS}

    def _commit_positions(self) -> None:
        """Commit the archived positions to the broker, so that prune keeps records that are not archived yet."""
        manifest, self._on_record = self.writer.manifest, True
        archived = (source for source in self._sources if source.topic in PRUNED and source.topic in manifest.topics)
        positions = [at for source in archived for at in source.positions(manifest.topics[source.topic].position)]
        self._reader.commit(positions, f"committing the archived positions of {self._run}")
        event(logger, "archived", generation=manifest.generation, files=len(manifest.files))

    def _positions(self) -> dict[TopicPartitionKey, int]:
        return {(source.topic, p): at for source in self._sources for p, at in source.position.items()}

    def _archived(self) -> dict[TopicPartitionKey, int]:
        topics = self.writer.manifest.topics
        return {(name, p): at for name, topic in topics.items() for p, at in topic.position.items()}


class ArchivedArrays:
    """Copies the stored arrays that records name into the archive."""

    def __init__(self, kafka: KafkaConfig, run: str, store: Store) -> None:
        self._kafka, self._run = kafka, run
        self._archived = StoredArrays(store, arrays_folder(run))
        self._source: StoredArrays | None = None
        self._there: set[str] | None = None
        """Names of the arrays in the archive; None until a record names one."""

    def add(self, value: bytes | None) -> None:
        """Copy the arrays that a record names.

        Raises RecordError, which names the first that is missing, after the others are copied, and StoreError.
        """
        names = names_in(value)
        if not names:
            return
        if self._there is None:
            self._there = set(self._archived.sizes())
        new = sorted(names - self._there)
        if new and self._source is None:
            try:
                self._source = StoredArrays.of(self._run, self._kafka.arrays)
            except ConfigurationError as error:
                raise RecordError(f"its arrays are not archived: {error}") from error
        if self._source is not None and (missing := self._archived.copy_from(self._source, new)):
            raise RecordError(f"{len(missing)} of its arrays are not archived: {missing[0]}")
        self._there.update(new)


def archived_record(message: KafkaRecord, topic: str, skipped: SkippedRecords) -> ArchivedRecord:
    """Convert a message to a record of the archive.

    A message that cannot be decompressed gets no key and value, and a message with unreadable headers gets no headers;
    `skipped` then names it.
    """
    headers: tuple[tuple[str, bytes | None], ...] = ()
    if not message.readable:
        skipped.skip(message, UNREADABLE)
    with skipped.passing(message):
        headers = message.header_pairs()
    return ArchivedRecord(
        topic,
        message.partition,
        message.offset,
        message.timestamp_ms,
        message.key,
        message.value,
        headers or None,
    )
