"""The log of runs, which a tracker's feed reads: topics on the brokers, or an archive of them."""

from collections.abc import Iterator
from typing import Protocol

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.manifest import LOG
from rollstream.consumers.archive.tables import archived_records
from rollstream.consumers.archive.writer import records as records_of_archive
from rollstream.consumers.files.stores import ObjectMissing, Store, checked
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end, record_at
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.wire.catalogue import topic_name


class RunLog(Protocol):
    """Records of runs. Topics are named as in the catalogue, without the run."""

    def messages(self, run: str, topic: str, start: int) -> Iterator[KafkaRecord]:
        """Yield the committed records of a topic with one partition, from an offset to the topic's current end."""

    def record(self, run: str, topic: str, partition: int, offset: int) -> KafkaRecord | None:
        """Return one record, or None if it is no longer on the log."""

    def close(self) -> None:
        """Release clients."""


class BrokerLog(Closing):
    """Topics on the brokers. One client serves all calls of `record`."""

    def __init__(self, kafka: KafkaConfig) -> None:
        clients.check_broker(kafka)
        self._kafka = kafka
        self._reader: Reader | None = None

    def messages(self, run: str, topic: str, start: int) -> Iterator[KafkaRecord]:
        name = topic_name(run, topic)
        low, end = topic_admin.bounds(self._kafka, name)[0]
        return read_to_end(self._kafka, name, start=min(max(low, start), end))

    def record(self, run: str, topic: str, partition: int, offset: int) -> KafkaRecord | None:
        if self._reader is None:
            self._reader = Reader(self._kafka, fetch_wait_ms=10)
        try:
            return record_at(self._kafka, topic_name(run, topic), partition, offset, reader=self._reader)
        except TopicError:
            return None  # The record was pruned, or its topic is gone.

    def close(self) -> None:
        """Close the client."""
        if self._reader is not None:
            self._reader.close()


class ArchiveLog:
    """An archive. For each topic, the records of the file that was read last are kept for the next call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, tuple[str, dict[int, KafkaRecord]]] = {}

    def messages(self, run: str, topic: str, start: int) -> Iterator[KafkaRecord]:
        manifest = manifests.newest(self._store, run)
        if manifest is None or topic not in manifest.topics:
            return
        for partition in sorted(manifest.topics[topic].position):
            entries = records_of_archive(self._store, manifest, topic, partition, start)
            yield from (entry.message(run) for entry in entries)

    def record(self, run: str, topic: str, partition: int, offset: int) -> KafkaRecord | None:
        try:
            return self._record(run, topic, partition, offset)
        except ObjectMissing:  # An archiver has merged the file since the manifest was read.
            return self._record(run, topic, partition, offset)

    def _record(self, run: str, topic: str, partition: int, offset: int) -> KafkaRecord | None:
        manifest = manifests.newest(self._store, run)
        for file in manifest.files_of(LOG) if manifest else ():
            if (file.topic, file.partition) == (topic, partition) and file.first <= offset <= file.last:
                path, records = self._kept.get(topic, ("", {}))
                if path != file.path:
                    data = checked(self._store, file.path, file.sha256)
                    records = {e.offset: e.message(run) for e in archived_records(data, topic, partition)}
                    self._kept[topic] = (file.path, records)
                return records.get(offset)
        return None

    def close(self) -> None:
        """Release nothing: files are open only while they are read."""
