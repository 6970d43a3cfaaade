"""Groups and batches of every environment as a view of a topic: filled by position, restored by position, never the
only copy.

What it holds at a position follows from the records below it: times are those of the log, so that a store that lost
its files and is filled again has the same groups under the same names.
"""

import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING

from consumers.buffers import batch_files
from consumers.buffers.files import StoreError, read_json, remove, replacing, write_json
from consumers.buffers.group_config import GroupStoreConfig
from consumers.buffers.group_store import ReplayBuffer, Saved
from consumers.grouping.batch_maker import BatchMaker
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.examples import Source
from topics.logs import event
from topics.records import Rollout, TrainingBatch

logger = logging.getLogger(__name__)
_STATE = "position.json"
_SAVE_EVERY = 10_000


class GroupStore:
    """A `ReplayBuffer` for each environment that the log has rollouts of, and the position they were filled to.

    `save` is what makes a position count. Who is killed goes on from the last one saved: groups that sealed since then
    are on disk, seal again as they did, and are not written twice. One process at a time may have it open.
    """

    def __init__(
        self,
        root: str | Path,
        config: GroupStoreConfig | None = None,
        *,
        maker_of: Callable[[str], BatchMaker] | None = None,
    ) -> None:
        """`maker_of` makes the batch maker of an environment. Raises StoreError for files that are not whole."""
        self.root = Path(root)
        self.config = config or GroupStoreConfig()
        self._maker_of = maker_of
        self._lock = threading.RLock()
        self._start()

    def _start(self) -> None:
        path = self.root / _STATE
        state = read_json(path) if path.exists() else {}
        self._position = {int(p): offset for p, offset in state.get("position", {}).items()}
        self._stream_ms = {int(p): time for p, time in state.get("stream_ms", {}).items()}
        self._topic: list[str] = state.get("topic", [])
        """Name and id of the topic it is filled from, once it is."""
        self._counts: Counter[str] = Counter()
        self._buffers: dict[str, ReplayBuffer] = {}
        for environment, saved in state.get("environments", {}).items():
            self._open(environment, Saved(open_file=saved["open_file"], sealed=saved["sealed"]))

    def _open(self, environment: str, saved: Saved) -> ReplayBuffer:
        maker = self._maker_of(environment) if self._maker_of else None
        buffer = ReplayBuffer(self.root, environment, self.config, batch_maker=maker, resume=saved)
        self._buffers[environment] = buffer
        return buffer

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to be read, by partition."""
        return dict(self._position)

    @property
    def environments(self) -> Mapping[str, ReplayBuffer]:
        """The store of each environment met so far."""
        return dict(self._buffers)

    def read(self, partition: int, offset: int, at_ms: int, value: bytes | None) -> None:
        """Take one record of the log, `at_ms` its append time; one below the position is left out.

        A rollout joins its group, a training batch is written to `batches/` of the root; others, and what cannot be
        decoded or makes no sense, count and move time. Raises StoreError, and is then to be given the record again.
        """
        with self._lock:
            if offset >= self._position.get(partition, 0):
                self._take(partition, offset, at_ms, value)

    def _take(self, partition: int, offset: int, at_ms: int, value: bytes | None) -> None:
        now_ms = max(at_ms, self._stream_ms.get(partition, 0))
        for buffer in self._buffers.values():
            buffer.poll(now_ms / 1000, partition)
        why = "other"
        try:
            record = decode(value)
            if isinstance(record, Rollout):
                why = "rollouts"
                source = Source(partition, offset, record.uid)
                self._buffer(record.environment).add_rollout(record, source, now=now_ms / 1000)
            elif isinstance(record, TrainingBatch):
                why = "batches"
                batch_files.store_training_batch(self.root / batch_files.FOLDER, record, self.config.compression)
        except RecordError as error:
            why = "unreadable"
            event(logger, "record_left_out", level=logging.WARNING, partition=partition, offset=offset, why=str(error))
        self._counts[why] += 1
        self._stream_ms[partition] = now_ms
        self._position[partition] = offset + 1

    def _buffer(self, environment: str) -> ReplayBuffer:
        if not environment:
            raise RecordError("a rollout of no environment")
        found = self._buffers.get(environment)
        return found if found is not None else self._open(environment, Saved(open_file="", sealed=0))

    def fill(self, kafka: KafkaConfig, run: str, topic: str = "rollouts") -> int:
        """Read a run's `rollouts` (or `batches`) from the position to where it ends now, and save; how many records.

        Raises TopicError where the position is no longer in the log, StoreError for another topic than the one it was
        filled from before, one that was created again included.
        """
        name = topic_name(run, topic)
        identity = [name, clients.topic_ids(kafka, [name])[name]]
        if self._topic not in ([], identity):
            raise StoreError(
                f"the store in {self.root} is filled from {' with id '.join(self._topic)}, not from "
                f"{' with id '.join(identity)}; take an empty directory"
            )
        self._topic = identity
        start = {p: self._position.get(p, OFFSET_BEGINNING) for p in range(clients.partitions_of(kafka, name))}
        records = 0
        for message in clients.read_to_end(kafka, name, start=start):
            partition, offset = message.partition(), message.offset()
            assert partition is not None  # as in every message without an error
            assert offset is not None
            self.read(partition, offset, message.timestamp()[1], message.value())
            records += 1
            if records % _SAVE_EVERY == 0:
                self.save()
        self.save()
        return records

    def size(self) -> int:
        """Groups on disk, of all environments."""
        return sum(buffer.size() for buffer in self._buffers.values())

    def stats(self) -> dict[str, Any]:
        """Records read since it was opened, by kind, and the figures of each environment."""
        return {**self._counts, "environments": {name: buffer.stats() for name, buffer in self._buffers.items()}}

    def save(self, directory: str | Path | None = None) -> None:
        """Put everything on disk, with the position; in another directory a copy of it, too. Raises StoreError.

        Groups stay open: a stop and a start change nothing about how they seal.
        """
        with self._lock:
            saved = {name: buffer.prepare() for name, buffer in self._buffers.items()}
            write_json(self.root / _STATE, self._state(saved))
            for name, buffer in self._buffers.items():
                buffer.committed(saved[name])
            if directory is not None and Path(directory) != self.root:
                _copy(self.root, Path(directory))

    def _state(self, saved: Mapping[str, Saved]) -> dict[str, Any]:
        return {
            "format": 1,
            "topic": self._topic,
            "position": self._position,
            "stream_ms": self._stream_ms,
            "environments": {name: {"open_file": s.open_file, "sealed": s.sealed} for name, s in saved.items()},
        }

    def load(self, directory: str | Path) -> None:
        """Become what was saved in another directory, by copying it here. Raises StoreError where nothing was saved
        there, or this store holds something already."""
        source = Path(directory)
        if not (source / _STATE).exists():
            raise StoreError(f"{source} holds no store of groups; save one there first")
        if self._buffers or (self.root / _STATE).exists():
            raise StoreError(f"the store in {self.root} is not empty; load into one that is")
        _copy(source, self.root)
        self._start()


def _copy(source: Path, target: Path) -> None:
    """Copy a store's files, the position last: files of sealed groups and of batches that are there already stay."""
    for path in sorted(source.rglob("*.parquet")):
        to = target / path.relative_to(source)
        if not to.exists():
            _copy_file(path, to)
    for path in sorted(source.rglob("*.jsonl")):
        _copy_file(path, target / path.relative_to(source))
    _copy_file(source / _STATE, target / _STATE)
    for path in target.rglob("open-*.parquet"):
        if not (source / path.relative_to(target)).exists():
            remove(path)


def _copy_file(source: Path, target: Path) -> None:
    with open(source, "rb") as reading, replacing(target) as writing:
        shutil.copyfileobj(reading, writing)
