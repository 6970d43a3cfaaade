"""Groups and batches of every environment as a view of a topic: filled by position, restored by position, never the
only copy.

What it holds at a position follows from the records below it: times are those of the log, so that a store that lost
its files and is filled again has the same groups under the same names.
"""

import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING

from consumers.buffers import batch_files
from consumers.buffers.files import (
    DirectoryLock,
    StoreError,
    lock_directory,
    read_json,
    remove,
    replacing,
    write_bytes,
    write_json,
)
from consumers.buffers.group_config import GroupStoreConfig
from consumers.buffers.group_store import LOCK, GroupReplayBuffer, Saved
from consumers.buffers.open_groups import Cancelled, Key
from consumers.closing import Closing
from consumers.grouping.batch_maker import BatchMaker
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.examples import Source
from topics.logs import event
from topics.records import GroupCancelled, Rollout, TrainingBatch
from topics.validation import batch_problems

logger = logging.getLogger(__name__)
_STATE = "position.json"
_SAVE_EVERY = 10_000


@dataclass
class _Filled:
    """How far the store was filled from one topic."""

    identity: list[str] = field(default_factory=list)
    """Name and id of the topic; empty where it was filled by `read` alone."""
    position: dict[int, int] = field(default_factory=dict)
    stream_ms: dict[int, int] = field(default_factory=dict)
    """Highest append time, by partition."""


class GroupStore(Closing):
    """A `GroupReplayBuffer` for each environment that the log has rollouts of, a run's training batches where it is
    filled from these too, and the positions all of it was filled to.

    `save` is what makes a position count. Who is killed goes on from the last one saved: groups that sealed since then
    are on disk, seal again as they did, and are not written twice. It is the only writer below its root until `close`,
    or until nobody refers to it any more; with `read_only` it shows what was saved when it was opened, also beside a
    writer.
    """

    def __init__(
        self,
        root: str | Path,
        config: GroupStoreConfig | None = None,
        *,
        maker_of: Callable[[str], BatchMaker] | None = None,
        read_only: bool = False,
    ) -> None:
        """`maker_of` makes the batch maker of an environment.

        Raises StoreError for files that are not whole, where another writer has the root, or where there is nothing to
        read for a store that is read only.
        """
        self.root = Path(root)
        self.config = config or GroupStoreConfig()
        self._maker_of = maker_of
        self._lock = threading.RLock()
        if read_only and not (self.root / _STATE).exists():
            raise StoreError(f"{self.root} holds no store of groups; fill one there first, or look at the path")
        self._writer: DirectoryLock | None = None if read_only else lock_directory(self.root, LOCK)
        self._buffers: dict[str, GroupReplayBuffer] = {}
        try:
            self._start()
        except BaseException:
            self.release()
            raise

    def _start(self) -> None:
        path = self.root / _STATE
        state = read_json(path) if path.exists() else {}
        self._counts: Counter[str] = Counter()
        try:
            self._topics = _topics_of(state)
            environments = {name: _saved_of(saved) for name, saved in state.get("environments", {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{path} is no state of a store of groups ({error!r}); restore it") from error
        for environment, saved in environments.items():
            self._open(environment, saved)

    def _open(self, environment: str, saved: Saved) -> GroupReplayBuffer:
        maker = self._maker_of(environment) if self._maker_of else None
        buffer = GroupReplayBuffer(
            self.root, environment, self.config, batch_maker=maker, resume=saved, read_only=self._writer is None
        )
        self._buffers[environment] = buffer
        return buffer

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset of `rollouts` to be read, by partition."""
        return self.position_of("rollouts")

    def position_of(self, topic: str) -> Mapping[int, int]:
        """Next offset of a topic of the run (`rollouts` or `batches`) to be read, by partition."""
        return dict(self._topics[topic].position) if topic in self._topics else {}

    @property
    def environments(self) -> Mapping[str, GroupReplayBuffer]:
        """The store of each environment met so far."""
        return dict(self._buffers)

    def read(self, partition: int, offset: int, at_ms: int, value: bytes | None, *, topic: str = "rollouts") -> None:
        """Take one record of the log, `at_ms` its append time; one below the position in its topic is left out.

        A rollout joins its group, a cancelled member is waited for no longer, a training batch is written to `batches/`
        of the root; others, and what cannot be decoded or makes no sense, count and move time. Raises StoreError, and
        is then to be given the record again.
        """
        with self._lock:
            self._check_writable()
            filled = self._topics.setdefault(topic, _Filled())
            if offset >= filled.position.get(partition, 0):
                self._take(filled, partition, offset, at_ms, value)

    def _take(self, filled: _Filled, partition: int, offset: int, at_ms: int, value: bytes | None) -> None:
        now_ms = max(at_ms, filled.stream_ms.get(partition, 0))
        if filled is self._topics.get("rollouts"):
            for buffer in self._buffers.values():
                buffer.poll(now_ms / 1000, partition)
        why = "other"
        try:
            record = decode(value)
            if isinstance(record, Rollout):
                why = "rollouts"
                source = Source(partition, offset, record.uid)
                self._buffer(record.environment).add_rollout(record, source, now=now_ms / 1000)
            elif isinstance(record, GroupCancelled):
                why = "cancellations"
                self._buffer(record.environment).cancel(record, partition, now=now_ms / 1000)
            elif isinstance(record, TrainingBatch):
                why = "batches"
                if problems := batch_problems(record):
                    raise RecordError(problems[0])
                batch_files.store_training_batch(self.root / batch_files.FOLDER, record, self.config.compression)
        except RecordError as error:
            why = "unreadable"
            event(logger, "record_left_out", level=logging.WARNING, partition=partition, offset=offset, why=str(error))
        self._counts[why] += 1
        filled.stream_ms[partition] = now_ms
        filled.position[partition] = offset + 1

    def _buffer(self, environment: str) -> GroupReplayBuffer:
        if not environment:
            raise RecordError("a record of no environment")
        found = self._buffers.get(environment)
        return found if found is not None else self._open(environment, Saved(open_file="", sealed=0))

    def fill(self, kafka: KafkaConfig, run: str, topic: str = "rollouts") -> int:
        """Read a run's `rollouts` (or `batches`) from the position to where it ends now, and save; how many records.

        Raises TopicError where the position is no longer in the log, StoreError for another run than the one it was
        filled from before, one whose topic was created again included.
        """
        self._check_writable()
        name = topic_name(run, topic)
        identity = [name, clients.topic_ids(kafka, [name])[name]]
        for kind, filled in self._topics.items():
            wanted = identity if kind == topic else [topic_name(run, kind), *filled.identity[1:]]
            if filled.identity and filled.identity != wanted:
                raise StoreError(
                    f"the store in {self.root} is filled from {' with id '.join(filled.identity)}, not from "
                    f"{' with id '.join(wanted)}; take an empty directory"
                )
        filled = self._topics.setdefault(topic, _Filled())
        filled.identity = identity
        start = {p: filled.position.get(p, OFFSET_BEGINNING) for p in range(clients.partitions_of(kafka, name))}
        records = 0
        for message in clients.read_to_end(kafka, name, start=start):
            partition, offset = message.partition(), message.offset()
            assert partition is not None  # as in every message without an error
            assert offset is not None
            self.read(partition, offset, message.timestamp()[1], message.value(), topic=topic)
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
        """Put everything on disk, with the positions; in another directory a copy of it, too. Raises StoreError.

        Groups stay open: a stop and a start change nothing about how they seal.
        """
        with self._lock:
            self._check_writable()
            saved = {name: buffer.prepare() for name, buffer in self._buffers.items()}
            write_json(self.root / _STATE, self._state(saved))
            for name, buffer in self._buffers.items():
                buffer.committed(saved[name])
            if directory is not None and Path(directory).resolve() != self.root.resolve():
                with lock_directory(Path(directory), LOCK):
                    _copy(self.root, Path(directory))

    def _state(self, saved: Mapping[str, Saved]) -> dict[str, Any]:
        return {
            "format": 2,
            "topics": {name: asdict(filled) for name, filled in self._topics.items()},
            "environments": {name: asdict(s) for name, s in saved.items()},
        }

    def load(self, directory: str | Path) -> None:
        """Become what was saved in another directory, by copying it here. Raises StoreError where nothing was saved
        there, or this store holds something already."""
        self._check_writable()
        source = Path(directory)
        if not (source / _STATE).exists():
            raise StoreError(f"{source} holds no store of groups; save one there first")
        if self._buffers or (self.root / _STATE).exists():
            raise StoreError(f"the store in {self.root} is not empty; load into one that is")
        _copy(source, self.root)
        self._start()

    def close(self) -> None:
        """`save`, and let others write there; closing again does nothing. Raises StoreError, and is then still open."""
        with self._lock:
            if self._writer is not None and self._writer.held:
                self.save()
                self.release()

    def release(self) -> None:
        """Let others write there; what was not saved by now is read again from the log."""
        for buffer in self._buffers.values():
            buffer.release()
        if self._writer is not None:
            self._writer.release()

    def _check_writable(self) -> None:
        if self._writer is None or not self._writer.held:
            why = "was opened to be read only" if self._writer is None else "is closed, or another process has it"
            raise StoreError(f"the store in {self.root} {why}; open it to write")


def _topics_of(state: Mapping[str, Any]) -> dict[str, _Filled]:
    """How far each topic was read, from the file of the state."""
    if state.get("format") == 1:  # one topic
        kind = state["topic"][0].rpartition(".")[2] if state["topic"] else "rollouts"
        said = {kind: {**state, "identity": state["topic"]}}
    else:
        said = state.get("topics", {})
    return {
        kind: _Filled(
            identity=list(of["identity"]),
            position={int(p): int(offset) for p, offset in of["position"].items()},
            stream_ms={int(p): int(time) for p, time in of["stream_ms"].items()},
        )
        for kind, of in said.items()
    }


def _saved_of(said: Mapping[str, Any]) -> Saved:
    cancelled = tuple(Cancelled(Key(*key), tuple(uids)) for key, uids in said.get("cancelled", ()))
    return Saved(open_file=said["open_file"], sealed=said["sealed"], cancelled=cancelled)


def _copy(source: Path, target: Path) -> None:
    """Copy a store's files, the state last: files of sealed groups and of batches that are there already stay.

    The state is read first, so that what it names is copied though a writer goes on there.
    """
    state = (source / _STATE).read_bytes()
    for path in sorted(source.rglob("*.parquet")):
        to = target / path.relative_to(source)
        if not to.exists():
            with contextlib.suppress(FileNotFoundError):  # open groups of the last save but one, deleted meanwhile
                _copy_file(path, to)
    for path in sorted(source.rglob("*.jsonl")):
        _copy_file(path, target / path.relative_to(source))
    write_bytes(target / _STATE, state)
    for path in target.rglob("open-*.parquet"):
        if not (source / path.relative_to(target)).exists():
            remove(path)


def _copy_file(source: Path, target: Path) -> None:
    with open(source, "rb") as reading, replacing(target) as writing:
        shutil.copyfileobj(reading, writing)
