"""Sources of a run's log: its topics, or its archive. Both return records by topic, from given positions on.

Indexes, observers and trackers read a run through them.

An index polls `rollouts` separately and reads it first, because records of the other topics refer to rollouts. Steps
follow once the batch index has been read to its end, because an observer keeps a limited number of uses of batches that
it does not know yet.
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.manifest import LOG
from rollstream.consumers.archive.tables import ArchivedRecord, archived_records
from rollstream.consumers.archive.writer import records as records_of_archive
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.files.stores import ObjectMissing, Store, checked
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.reader import Reader, read_to_end, record_at
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord, Place
from rollstream.topics.wire.catalogue import topic_name

ROLLOUTS, STEPS = "rollouts", "steps"
PLACES = (ROLLOUTS, "journal", "batch-index", STEPS, "policies")
"""Topics of whose records an index keeps the places."""
OBSERVED = (*PLACES, "metrics", "control")
"""Topics that an observer follows."""
OTHERS = (
    "journal",
    "batches",
    "batch-index",
    "steps",
    "policies",
    "dead-letters",
    "metrics",
    "control",
    "evals",
    "calls",
)
"""Topics that an index reads besides `rollouts`."""
POLL_BYTES = 16 * 1024 * 1024
"""Bytes of values at which a poll of an archive ends, whatever number of records was asked for."""
_ONE_RECORD: dict[str, Any] = {"max.partition.fetch.bytes": 64 * 1024, "queued.min.messages": 1}
"""Settings of a client that fetches single records; by default it would also fetch megabytes of later records."""
Positions = Mapping[Place, int]
"""Offset of the next record, by the topic's name in the catalogue and by partition."""


class LogSource(Protocol):
    """The log of one run, as an index or an observer reads it. Topics are named as in the catalogue."""

    @property
    def run(self) -> str:
        """Name of the run."""
        ...

    @property
    def kind(self) -> str:
        """Kind of the source: topics or archive."""
        ...

    def identity(self) -> dict[str, str]:
        """Return values that identify this log; they differ for another run and for topics that were created again."""
        ...

    def bounds(self) -> dict[Place, tuple[int, int]]:
        """Return the first offset and the end of every partition now."""
        ...

    def begin(self, positions: Positions) -> None:
        """Read each partition from its position on, or from its beginning if it has no position."""
        ...

    def poll(self, rollouts: bool, most: int, wait_s: float) -> list[KafkaRecord]:
        """Return up to `most` records of `rollouts`, or of the other topics; wait at most `wait_s` for the first.

        It returns fewer records if they are large, but none only if there are none.
        """
        ...

    def ends(self) -> Positions:
        """Return the ends of partitions that were read to their end; transaction markers count."""
        ...

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record; any thread may ask. Raises TopicError if the log does not have it."""
        ...

    def messages(self, name: str, partition: int, start: int) -> Iterator[KafkaRecord]:
        """Yield the records of a partition from an offset, or from its beginning, to its present end."""
        ...

    def close(self) -> None:
        """Release clients and files."""
        ...


class TopicSource:
    """The topics of a run on its brokers."""

    kind = "topics"

    def __init__(
        self, kafka: KafkaConfig, run: str, names: Collection[str] = (ROLLOUTS, *OTHERS), **overrides: Any
    ) -> None:
        """`names` are the topics to read, and `overrides` are client settings. Raises TopicError if the run does not
        exist."""
        self.run = run
        self._kafka, self._names, self._overrides = kafka, names, overrides
        clients.check_broker(kafka)
        topic_admin.partitions_of(kafka, topic_name(run, ROLLOUTS))  # Raises the error that names the remedy.
        self._starts: dict[bool, dict[Place, int]] = {}
        self._steps: dict[Place, int] = {}
        """Starts of the steps as long as they are not read."""
        self._followers: dict[bool, TopicFollower] = {}
        self._reader: Reader | None = None
        self._lock = threading.Lock()

    def identity(self) -> dict[str, str]:
        ids = topic_admin.topic_ids(self._kafka, [topic_name(self.run, name) for name in (ROLLOUTS, *OTHERS)])
        return {"run": self.run, "source": self.kind, **{f"topic {name}": topic_id for name, topic_id in ids.items()}}

    def bounds(self) -> dict[Place, tuple[int, int]]:
        return {
            (name, partition): bounds
            for name in self._names
            for partition, bounds in topic_admin.bounds(self._kafka, topic_name(self.run, name)).items()
        }

    def begin(self, positions: Positions) -> None:
        self._end()
        self._starts, self._steps = {True: {}, False: {}}, {}
        for place, (low, _end) in self.bounds().items():
            starts = self._steps if place[0] == STEPS else self._starts[place[0] == ROLLOUTS]
            start = max(low, positions[place]) if place in positions else BEGINNING
            starts[topic_name(self.run, place[0]), place[1]] = start

    def poll(self, rollouts: bool, most: int, wait_s: float) -> list[KafkaRecord]:
        if rollouts not in self._followers:
            self._followers[rollouts] = TopicFollower(self._kafka, self._starts[rollouts], **self._overrides)
        follower = self._followers[rollouts]
        if not rollouts and self._steps and (topic_name(self.run, "batch-index"), 0) in follower.caught_up:
            follower.add(self._steps)
            self._steps = {}
        return follower.poll(most, wait_s)

    def ends(self) -> Positions:
        prefix = len(topic_name(self.run, ROLLOUTS)) - len(ROLLOUTS)
        return {
            (topic[prefix:], partition): end
            for follower in self._followers.values()
            for (topic, partition), end in follower.ends.items()
        }

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        topic = topic_name(self.run, name)
        with self._lock:
            if self._reader is None:
                self._reader = Reader(self._kafka, fetch_wait_ms=10, **_ONE_RECORD)
            bounds = self._reader.bounds(topic)
            if partition not in bounds:
                raise TopicError(f"{topic} has no partition {partition}")
            low, high = bounds[partition]
            if not low <= offset < high:
                raise TopicError(f"{topic}[{partition}] holds offsets {low} to {high - 1}, not {offset}")
            message = record_at(self._kafka, topic, partition, offset, reader=self._reader)
        if message is None:
            raise TopicError(f"{topic}[{partition}] holds no record at offset {offset}")
        return message

    def messages(self, name: str, partition: int, start: int) -> Iterator[KafkaRecord]:
        topic = topic_name(self.run, name)
        start = max(start, topic_admin.bounds(self._kafka, topic, [partition])[partition][0])
        return read_to_end(self._kafka, topic, partitions=[partition], start={partition: start})

    def _end(self) -> None:
        """Stop following the topics."""
        for follower in self._followers.values():
            follower.close()
        self._followers = {}

    def close(self) -> None:
        self._end()
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None


class ArchiveSource:
    """The archive of a run. `bounds` looks for files and topics that were added; they are then read, too."""

    kind = "archive"

    def __init__(self, store: Store, run: str, names: Collection[str] = (ROLLOUTS, *OTHERS)) -> None:
        """`names` are the topics to read. Raises ConfigurationError if the archive does not contain the run."""
        self.run = run
        self._store, self._names = store, names
        self._lock = threading.Lock()
        self._manifest = manifests.existing(store, run)
        self._records: dict[str, tuple[str, dict[int, KafkaRecord]]] = {}
        """By topic, the path and the records of the file from which `record` has returned a record last."""
        self._at: dict[Place, int] = {}
        self._reading: dict[Place, tuple[Iterator[ArchivedRecord], int]] = {}
        """Records of each partition that is being read, and the end of the files that they come from."""

    def identity(self) -> dict[str, str]:
        topics = {f"topic {name}": topic.topic_id for name, topic in self._manifest.topics.items()}
        return {"run": self.run, "source": self.kind, "url": self._store.url, **topics}

    def bounds(self) -> dict[Place, tuple[int, int]]:
        self._manifest = manifests.existing(self._store, self.run)
        bounds = {
            (name, partition): (topic.begin[partition], end)
            for name, topic in self._manifest.topics.items()
            for partition, end in topic.position.items()
            if name in self._names
        }
        for place, (low, _end) in bounds.items():
            self._at.setdefault(place, low)
        return bounds

    def begin(self, positions: Positions) -> None:
        self.close()
        self._at = {place: max(low, positions.get(place, low)) for place, (low, _end) in self.bounds().items()}

    def poll(self, rollouts: bool, most: int, wait_s: float) -> list[KafkaRecord]:
        del wait_s  # Waiting would not bring more records.
        places = (place for place in sorted(self._at) if (place[0] == ROLLOUTS) is rollouts)
        answer: list[KafkaRecord] = []
        size_bytes = 0
        for record in chain.from_iterable(map(self._unread, places)):
            answer.append(record)
            size_bytes += len(record.value or b"")
            if len(answer) >= most or size_bytes >= POLL_BYTES:
                break
        return answer

    def _unread(self, place: Place) -> Iterator[KafkaRecord]:
        """Yield the next records of a partition, up to the end of the files chosen when its reading began."""
        position = self._manifest.topics[place[0]].position[place[1]]
        if self._at[place] >= position:
            return
        if place not in self._reading:
            entries = records_of_archive(self._store, self._manifest, *place, start=self._at[place])
            self._reading[place] = entries, position
        reading, end = self._reading[place]
        for entry in reading:
            self._at[place] = entry.offset + 1
            yield entry.message(self.run)
        del self._reading[place]
        self._at[place] = end  # The manifest may have moved on since these files were chosen.

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        with self._lock:
            for _ in range(2):
                with suppress(ObjectMissing):  # An archiver may have merged the file.
                    record = self._record(name, partition, offset)
                    if record is not None:
                        return record
                # Another process may have indexed a file that was added later.
                self._manifest = manifests.existing(self._store, self.run)
        raise TopicError(f"the archive of run {self.run} has no {name} {partition}:{offset}")

    def _record(self, name: str, partition: int, offset: int) -> KafkaRecord | None:
        for file in self._manifest.files_of(LOG):
            if (file.topic, file.partition) == (name, partition) and file.first <= offset <= file.last:
                path, records = self._records.get(name, ("", {}))
                if path != file.path:
                    data = checked(self._store, file.path, file.sha256)
                    records = {e.offset: e.message(self.run) for e in archived_records(data, name, partition)}
                    self._records[name] = file.path, records
                return records.get(offset)
        return None

    def messages(self, name: str, partition: int, start: int) -> Iterator[KafkaRecord]:
        manifest = manifests.existing(self._store, self.run)
        for entry in records_of_archive(self._store, manifest, name, partition, start=start):
            yield entry.message(self.run)

    def ends(self) -> Positions:
        return {place: at for place, at in self._at.items() if at >= self._manifest.topics[place[0]].position[place[1]]}

    def close(self) -> None:
        self._reading = {}
