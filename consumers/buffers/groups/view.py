"""The store of all environments' groups and batches, as a view of topics: filled and restored by position.

Its content at a position depends only on the records before it, and its times come from the log. So a store that
lost its files and is filled again has the same groups under the same names.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollstream.consumers.buffers.groups import batch_files, group_files
from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.group_files import VIEW_STATE
from rollstream.consumers.buffers.groups.index import INDEX
from rollstream.consumers.buffers.groups.open_groups import SavedGroup
from rollstream.consumers.buffers.groups.store import (
    LOCK,
    STATE,
    GroupReplayBuffer,
    SavedStore,
    SavedView,
    TopicProgress,
)
from rollstream.consumers.buffers.storage.journal import read_state, write_state
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import (
    DirectoryLock,
    StoreError,
    copy_file,
    lock_directory,
    write_bytes,
)
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import Skipped, SkippedRecords
from rollstream.topics.records import GroupCancelled, Rollout, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.rl_examples import Source
from rollstream.topics.wire.validation import batch_problems, cancellation_problems, problems

_SAVE_EVERY = 10_000
_ELSEWHERE = "use an empty directory"


class GroupStore(Closing):
    """A `GroupReplayBuffer` for each environment in the log, the run's training batches if it is also filled from
    `batches`, and the positions in both topics.

    `save` commits a position. After a kill the store continues from the last saved position: groups that sealed
    after that position are on disk, seal again in the same way, and are not written twice. The store is the only writer
    below its root until `close`, or until it is garbage-collected. With `read_only` it shows the saved state at the
    time of opening, and another process may write.
    """

    def __init__(
        self,
        root: str | Path,
        config: GroupStoreConfig | None = None,
        *,
        maker_of: Callable[[str], BatchMaker] | None = None,
        read_only: bool = False,
    ) -> None:
        """`maker_of` creates the batch maker of an environment.

        Raises StoreError if the saved state or a file of open groups is damaged, another process writes below the root,
        a read-only store is empty, or a store to write was filled with other `accept_policy_versions` or, in part, by
        hand.
        """
        self.root = Path(root)
        self.config = config or GroupStoreConfig()
        self._maker_of = maker_of
        self._lock = threading.RLock()
        self._saving = threading.RLock()
        """Held while a copy needs the files to stay; acquired before `_lock`."""
        if read_only and not (self.root / VIEW_STATE).exists():
            raise StoreError(f"{self.root} contains no store of groups; fill one there first, or check the path")
        self._writer: DirectoryLock | None = None if read_only else lock_directory(self.root, LOCK)
        self._buffers: dict[str, GroupReplayBuffer] = {}
        try:
            self._start()
        except BaseException:
            self.release()
            raise

    def _start(self) -> None:
        self._counts: Counter[str] = Counter()
        self._skipped = SkippedRecords("group-store")
        self._topics: dict[str, TopicProgress] = {}
        path = self.root / VIEW_STATE
        if path.exists():
            saved, open_groups = read_state(path, SavedView, SavedGroup)
            self._topics = saved.topics
            self._check_accepted(saved.accept_policy_versions)
            for environment, store in saved.environments.items():
                own = tuple(group for group in open_groups if group.environment == environment)
                self._open(environment, replace(store, open=own))

    def _check_accepted(self, before: list[int]) -> None:
        """Raise StoreError if rollouts were read with another choice of policy versions: the positions are past those
        that were left out, so they would never be added."""
        if self._writer is None or not self.position or before == self._accepted():
            return
        raise StoreError(
            f"the store in {self.root} was filled with rollouts of {_versions_text(before)}, not of "
            f"{_versions_text(self._accepted())}, and will not get those that it left out; use an empty directory, or "
            "the versions that it has"
        )

    def _accepted(self) -> list[int]:
        return sorted(set(self.config.accept_policy_versions))

    def _open(self, environment: str, saved: SavedStore) -> GroupReplayBuffer:
        own_state = self.root / group_files.folder_of(environment) / STATE
        if self._writer is not None and own_state.exists():
            raise StoreError(
                f"{own_state} belongs to a store filled by hand with GroupReplayBuffer; fill another directory"
            )
        maker = self._maker_of(environment) if self._maker_of else None
        buffer = GroupReplayBuffer(
            self.root, environment, self.config, batch_maker=maker, resume=saved, read_only=self._writer is None
        )
        self._buffers[environment] = buffer
        return buffer

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset of `rollouts` to read, by partition."""
        return self.position_of("rollouts")

    def position_of(self, topic: str) -> Mapping[int, int]:
        """Next offset of a topic of the run (`rollouts` or `batches`) to read, by partition."""
        return dict(self._topics[topic].position) if topic in self._topics else {}

    @property
    def environments(self) -> Mapping[str, GroupReplayBuffer]:
        """The store of each environment read so far."""
        return dict(self._buffers)

    def read(self, partition: int, offset: int, at_ms: int, value: bytes | None, *, topic: str = "rollouts") -> None:
        """Read one record of the log with append time `at_ms`; a record below the position of its topic is skipped.

        A rollout joins its group, a cancellation ends the wait for its members, and a training batch is written to
        `batches/` below the root. Records of other kinds, and undecodable or invalid records, are only counted, and
        advance time. After a StoreError, pass the same record again.
        """
        with self._lock:
            self._check_writable()
            filled = self._topics.setdefault(topic, TopicProgress())
            if not filled.has(partition, offset):
                self._apply(topic, partition, offset, at_ms, value)

    def _apply(self, kind: str, partition: int, offset: int, at_ms: int, value: bytes | None) -> None:
        filled = self._topics[kind]
        now_ms = max(at_ms, filled.stream_ms.get(partition, 0))
        if kind == "rollouts":
            for buffer in self._buffers.values():
                buffer.poll(now_ms / 1000, partition)
        count_name = "other"
        try:
            record = decode(value)
            if isinstance(record, Rollout):
                count_name = "rollouts"
                source = Source(partition, offset, record.uid)
                self._buffer(record).add_rollout(record, source, now=now_ms / 1000)
            elif isinstance(record, GroupCancelled):
                count_name = "cancellations"
                self._buffer(record).cancel(record, partition, now=now_ms / 1000)
            elif isinstance(record, TrainingBatch):
                count_name = "batches"
                if wrong := batch_problems(record):
                    raise RecordError(wrong[0])
                batch_files.store_training_batch(self.root / batch_files.FOLDER, record, self.config.compression)
        except RecordError as error:
            count_name = "unreadable"
            self._skipped.note(Skipped(kind, partition, offset, str(error)))
        self._counts[count_name] += 1
        filled.stream_ms[partition] = now_ms
        filled.position[partition] = offset + 1

    def _buffer(self, record: Rollout | GroupCancelled) -> GroupReplayBuffer:
        """The store of a record's environment. Raises RecordError if it would be new, and the record is invalid: an
        invalid record creates no folder. The stores themselves refuse other invalid records."""
        buffer = self._buffers.get(record.environment)
        if buffer is not None:
            return buffer
        wrong = problems(record) if isinstance(record, Rollout) else cancellation_problems(record)
        if wrong:
            raise RecordError(wrong[0])
        return self._open(record.environment, SavedStore(sealed=0))

    def fill(self, kafka: KafkaConfig, run: str, topic: str = "rollouts") -> int:
        """Read a run's `rollouts` (or `batches`) from the position to the current end, save, and return the number of
        records.

        Raises TopicError if the position is no longer in the log, the store was filled from another run before, or the
        topic was created again.
        """
        self._check_writable()
        name = topic_name(run, topic)
        topic_id = topic_admin.topic_ids(kafka, [name])[name]
        for kind, filled in self._topics.items():
            filled.check_topic(topic_name(run, kind), topic_id if kind == topic else filled.topic_id, _ELSEWHERE)
        filled = self._topics.setdefault(topic, TopicProgress())
        starts = filled.starts(name, topic_admin.bounds(kafka, name), _ELSEWHERE)
        filled.topic, filled.topic_id = name, topic_id
        records = 0
        for message in read_to_end(kafka, name, start=starts):
            partition, offset = message.partition, message.offset
            assert offset is not None
            self.read(partition, offset, message.timestamp_ms, message.value, topic=topic)
            records += 1
            if records % _SAVE_EVERY == 0:
                self.save()
        self.save()
        return records

    def size(self) -> int:
        """Number of groups on disk in all environments."""
        return sum(buffer.size() for buffer in self._buffers.values())

    def stats(self) -> dict[str, Any]:
        """Return the numbers of records read since opening, by kind, and the statistics of each environment."""
        return {**self._counts, "environments": {name: buffer.stats() for name, buffer in self._buffers.items()}}

    def save(self, directory: str | Path | None = None) -> None:
        """Write groups, batches and positions to disk, and copy them to `directory` if given. Raises StoreError.

        Open groups stay open, so a restart does not change how they seal. Other threads can add during the copy.
        """
        with self._saving:
            with self._lock:
                self._check_writable()
                saved = {name: buffer.prepare() for name, buffer in self._buffers.items()}
                environments = {name: replace(store, open=()) for name, store in saved.items()}
                state = SavedView(
                    accept_policy_versions=self._accepted(), topics=self._topics, environments=environments
                )
                open_groups = [group for store in saved.values() for group in store.open]
                write_state(self.root / VIEW_STATE, state, open_groups)
            if directory is not None and Path(directory).resolve() != self.root.resolve():
                with lock_directory(Path(directory), LOCK):
                    _copy(self.root, Path(directory))

    def load(self, directory: str | Path) -> None:
        """Copy the saved state of another directory into this empty store. Raises StoreError if nothing was saved
        there, or this store is not empty."""
        self._check_writable()
        source = Path(directory)
        if not (source / VIEW_STATE).exists():
            raise StoreError(f"{source} contains no store of groups; save one there first")
        read_state(source / VIEW_STATE, SavedView, SavedGroup)
        if self._buffers or (self.root / VIEW_STATE).exists():
            raise StoreError(f"the store in {self.root} is not empty; load into an empty store")
        _copy(source, self.root)
        self._start()

    def close(self) -> None:
        """Call `save` and `release`; closing again does nothing. If it raises StoreError, the store stays open."""
        with self._saving, self._lock:
            if self._writer is not None and self._writer.held:
                self.save()
                self.release()

    def release(self) -> None:
        """Let another process write below the root; records not yet saved are read again from the log."""
        for buffer in self._buffers.values():
            buffer.release()
        if self._writer is not None:
            self._writer.release()

    def _check_writable(self) -> None:
        if self._writer is None or not self._writer.held:
            why = "was opened read-only" if self._writer is None else "is closed, or another process writes to it"
            raise StoreError(f"the store in {self.root} {why}; open it to write")


def _versions_text(versions: Collection[int]) -> str:
    return f"policy versions {', '.join(map(str, versions))}" if versions else "all policy versions"


def _copy(source: Path, target: Path) -> None:
    """Copy a store's files, the state last; existing files of sealed groups and batches stay.

    A writer may continue in `source`: it deletes nothing, and the index still begins with the groups of the state.
    Other folders below the roots may be other stores, for example copies.
    """
    state = (source / VIEW_STATE).read_bytes()
    environments = read_state(source / VIEW_STATE, SavedView, SavedGroup)[0].environments
    for folder in (batch_files.FOLDER, *map(group_files.folder_of, environments)):
        for path in sorted((source / folder).rglob("*.parquet")):
            to = target / path.relative_to(source)
            if not to.exists():
                copy_file(path, to)
        for path in (source / folder).rglob(INDEX):
            copy_file(path, target / path.relative_to(source))
    write_bytes(target / VIEW_STATE, state)
