"""Reads a run's topics from where its archive ends to where they end now, once or again and again.

Topics are read in an order in which what is named lies in those read later, so that the archive of a live run is whole:
what its journal and steps name is in it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from consumers.archive.manifest import Manifest
from consumers.archive.store import Store
from consumers.archive.tables import Entry
from consumers.archive.writer import MOST_SMALL, ArchiveWriter, Place
from consumers.closing import Closing
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable
from topics.headers import header_pairs
from topics.logs import event
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)
TOPICS = (
    "steps",
    "policies",
    "control",
    "metrics",
    "journal",
    "batch-index",
    "batches",
    "dead-letters",
    "evals",
    "trajectories",
    "unlabelled",
    "rollouts",
)
"""All but weights, which are for machines to load, gigabytes, and soon deleted; `rollstream export` keeps them."""
PRUNED = ("rollouts", "journal", "batches", "batch-index")
"""Topics of which positions are committed, too: what is not archived yet is not pruned."""
FLUSH_BYTES = 64 * 1024 * 1024
_TIMEOUT_S = 60.0


def group_of(run: str) -> str:
    """Consumer group under which an archiver commits how far it is, for `rollstream prune` to see."""
    return f"{run}.archive"


@dataclass(frozen=True)
class Progress:
    """What a pass did."""

    records: int
    """Records that are new in the archive."""
    manifest: Manifest


class _Source:
    """One topic, followed from the archive's positions."""

    def __init__(self, kafka: KafkaConfig, run: str, topic: str, topic_id: str, writer: ArchiveWriter) -> None:
        self.topic = topic
        self._kafka, self._name = kafka, topic_name(run, topic)
        self.consumer: Consumer = clients.reader(kafka, fetch_wait_ms=10, group=group_of(run))
        partitions = range(clients.partitions_of(kafka, self._name, self.consumer))
        self.position = writer.begin(topic, topic_id, {p: self._bounds(p)[0] for p in partitions})
        """First offset that was not taken yet, by partition."""
        self._fetched = dict(self.position)
        self.consumer.assign([TopicPartition(self._name, p, at) for p, at in self.position.items()])

    def read(self, take: Callable[[Message], None]) -> None:
        """Give `take` every record up to where the topic ends now."""
        ends = {p: self._bounds(p)[1] for p in self.position}
        deadline = time.monotonic() + _TIMEOUT_S
        while any(self.position[p] < end for p, end in ends.items()):
            messages = clients.with_unreadable(self.consumer, clients.at_hand(self.consumer, 500, 0.05), self._fetched)
            for message in messages:
                error, partition, offset = message.error(), message.partition() or 0, message.offset() or 0
                if error is None:
                    # Only now: `take` may commit positions, and what follows in `messages` was not taken yet.
                    self.position[partition] = offset + 1
                    take(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    # Past what is no record, too: ends of transactions, and what was aborted.
                    self.position[partition] = max(self.position[partition], offset)
                else:
                    clients.raise_for(error, f"archiving {self._name}")
            if messages:
                deadline = time.monotonic() + _TIMEOUT_S
            elif time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"{self._name} gave nothing for {_TIMEOUT_S:g} s, and ends at {ends}; is the broker at "
                    f"{self._kafka.bootstrap_servers} up?"
                )

    def _bounds(self, partition: int) -> tuple[int, int]:
        ask = partial(self.consumer.get_watermark_offsets, TopicPartition(self._name, partition), 10.0)
        found: tuple[int, int] = clients.retrying(ask, f"asking where {self._name} begins and ends")
        return found

    def commit(self, position: Mapping[int, int]) -> None:
        """Tell the broker how far the archive is."""
        offsets = [TopicPartition(self._name, p, at) for p, at in position.items()]

        def call() -> None:
            self.consumer.commit(offsets=offsets, asynchronous=False)

        clients.retrying(call, f"committing how far {self._name} is archived")


class Archiver(Closing):
    """Archives a run to a store. Raises StateRefused where archive and topics do not belong together."""

    def __init__(
        self, kafka: KafkaConfig, run: str, store: Store, *, arrays: bool = False, flush_bytes: int = FLUSH_BYTES
    ) -> None:
        clients.check_broker(kafka)
        self._flush_bytes = flush_bytes
        self.writer = ArchiveWriter(store, run, arrays=arrays)
        self._sources: list[_Source] = []
        try:
            ids = clients.topic_ids(kafka, [topic_name(run, topic) for topic in TOPICS])
            for topic in TOPICS:
                self._sources.append(_Source(kafka, run, topic, ids[topic_name(run, topic)], self.writer))
        except BaseException:
            self.close()
            raise
        event(logger, "archive_opened", run=run, store=store.url, swept=self.writer.swept)

    def close(self) -> None:
        """Leave the broker; what was not committed does not count."""
        self.writer.close()
        for source in self._sources:
            source.consumer.close()

    def once(self) -> Progress:
        """Archive what there is. Raises Fenced where another process archives this run to the same place."""
        records = 0

        for source in self._sources:

            def take(message: Message, topic: str = source.topic) -> None:
                nonlocal records
                records += 1
                self.writer.add(entry_of(message, topic, self.writer.skipped))
                if self.writer.buffered_bytes >= self._flush_bytes:
                    # Files are written while the next records are read.
                    self.writer.start(self._positions())
                    self._tell()

            source.read(take)
        if records or self._positions() != self._archived():
            self.writer.commit(self._positions())
            self._tell()
        self.writer.compact(at_least=MOST_SMALL)
        return Progress(records, self.writer.manifest)

    def _tell(self) -> None:
        """Say how far the archive is."""
        manifest = self.writer.manifest
        for source in self._sources:
            if source.topic in PRUNED:
                source.commit(manifest.topics[source.topic].position)
        event(logger, "archived", generation=manifest.generation, files=len(manifest.files))

    def _positions(self) -> dict[Place, int]:
        return {(source.topic, p): at for source in self._sources for p, at in source.position.items()}

    def _archived(self) -> dict[Place, int]:
        topics = self.writer.manifest.topics
        return {(name, p): at for name, topic in topics.items() for p, at in topic.position.items()}


def entry_of(message: Message, topic: str, skipped: SkippedRecords) -> Entry:
    """A message as the archive keeps it. One that no client can decompress has neither key nor value, one whose headers
    cannot be read has none; `skipped` names it."""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    with skipped.passing(message):
        headers = header_pairs(message)
    return Entry(
        topic,
        message.partition() or 0,
        message.offset() or 0,
        message.timestamp()[1],
        message.key(),
        message.value(),
        headers or None,
    )
