"""The store of one environment's groups and batches: it collects rollouts into groups, writes sealed groups to
disk, forwards them to a batch maker, and writes the batches of the maker.

A group that `add_rollout`, `cancel`, `poll` or `close` seals is on disk when the call returns. Thread-safe.
"""

import contextlib
import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rollstream.consumers.buffers.groups import batch_files, group_files
from rollstream.consumers.buffers.groups.batch_files import StoredBatch
from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.forwarding import Forwarding
from rollstream.consumers.buffers.groups.group_files import PlacedRollout, RolloutGroup, part_name
from rollstream.consumers.buffers.groups.index import GroupIndex, KnownUids
from rollstream.consumers.buffers.groups.open_groups import CancelledMembers, OpenGroups, SavedGroup
from rollstream.consumers.buffers.rollouts.record import RolloutRecord, as_rollout
from rollstream.consumers.buffers.storage.journal import read_state, write_state
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker
from rollstream.consumers.log_view import LogView
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.files.atomic_files import (
    DirectoryLock,
    StoreError,
    lock_directory,
    remove_unfinished,
)
from rollstream.topics.logs import event
from rollstream.topics.records import GroupCancelled, Rollout
from rollstream.topics.wire.rl_examples import RLExample, Source
from rollstream.topics.wire.validation import untyped_problems

logger = logging.getLogger(__name__)
LOCK = ".lock"
STATE = "open.journal"
"""Name of the state file of a store that is not part of a view."""
_NO_PLACE = -1
"""Partition and offset of a rollout added by hand."""


@dataclass(frozen=True, kw_only=True)
class SavedStore:
    """State of a store at one moment, apart from its sealed groups."""

    sealed: int
    """Number of groups sealed at that moment; -1 means all groups on disk."""
    cancelled: tuple[CancelledMembers, ...] = ()
    """Cancelled members of open groups."""
    open: tuple[SavedGroup, ...] = ()
    """Open groups, oldest first; on disk they are records of their own."""


@dataclass
class TopicProgress(LogView):
    """Progress of a view in one topic, whose name is empty if the view was filled only by `read`."""

    stream_ms: dict[int, int] = field(default_factory=dict)
    """Highest append time, by partition."""


@dataclass(frozen=True, kw_only=True)
class SavedView:
    """State of a view at one moment."""

    accept_policy_versions: list[int]
    topics: dict[str, TopicProgress]
    environments: dict[str, SavedStore]


@dataclass(frozen=True, kw_only=True)
class ClosingReport:
    """The outcome of `close` for the groups that were open."""

    sealed: int
    """Number of groups that had min_group_size rollouts and were sealed."""
    kept: int
    """Number of smaller groups, kept in the file of open groups until the store is opened again."""


class GroupReplayBuffer(Closing):
    """One environment's groups and batches below `root_path`, in a separate folder.

    A reopened store continues: it has the groups that were open at the last flush or close, knows every rollout on
    disk, and offers undelivered rollouts to the batch maker again. The store is the only writer of its folder until
    `close`, or until it is garbage-collected.

    With `read_only` the store shows the groups and batches that were on disk when it was opened, and does not change
    the folder; another process may write to it.
    """

    def __init__(
        self,
        root_path: str | Path,
        environment: str = "",
        config: GroupStoreConfig | None = None,
        *,
        compression: str = "",
        batch_maker: BatchMaker | None = None,
        clock: Callable[[], float] = time.time,
        resume: SavedStore | None = None,
        read_only: bool = False,
    ) -> None:
        """Without an `environment`, groups are in `root_path` itself, and the first rollout determines the environment.
        `compression` overrides the compression in `config`.

        `clock` returns the time, in seconds since the Unix epoch, for calls without `now`.

        `resume` is for callers that keep the position in a log: the store returns to the saved state, and groups that
        sealed later and seal again are not written twice.

        Raises StoreError if the saved state or the file of open groups is damaged, if another process writes to the
        folder, or if the folder is part of a view of a run, and ConfigurationError if a read-only store is given a
        batch maker. Damaged files of sealed groups and of batches are logged and counted in `stats`; the store opens
        without them.
        """
        if read_only and batch_maker is not None:
            raise ConfigurationError("a read-only store makes no batches; leave the batch maker out")
        self.environment = environment
        self.directory = Path(root_path) / group_files.folder_of(environment) if environment else Path(root_path)
        self.config = config or GroupStoreConfig()
        if compression:
            self.config = replace(self.config, compression=compression)
        self._clock = clock
        self._maker = batch_maker
        self._lock = threading.RLock()
        self._writer: DirectoryLock | None = None if read_only else lock_directory(self.directory, LOCK)
        try:
            self._start(resume)
        except BaseException:
            self.release()
            raise

    def _start(self, resume: SavedStore | None) -> None:
        if self._writer is not None:
            if resume is None:
                self._refuse_part_of_view()
            remove_unfinished(self.directory)
            remove_unfinished(self.directory / batch_files.FOLDER)
        saved = resume or self._read_state()
        self._counts: Counter[str] = Counter()
        self._unwritten: list[RolloutGroup] = []
        self._unwritten_batch: StoredBatch | None = None
        # Without `resume`, groups that sealed after the state was written stay sealed.
        self._index = GroupIndex(self.directory, saved.sealed if resume else -1)
        self._uids = KnownUids(self._index)
        for error_text in self._index.damaged:
            self._count_damaged(error_text)
        self._batches, delivered = self._known_batches()
        self._forwarding = None
        if self._maker is not None:
            self._forwarding = Forwarding(self._maker, self.config, delivered)
            for entry in self._index:
                try:
                    self._forwarding.offer(partial(self._read, entry.file), entry)
                except StoreError as error:
                    self._count_damaged(str(error))
        self._open = OpenGroups(self.config)
        if self._writer is not None:
            self._reopen(saved)
        self.environment = self.environment or self._stored_environment()

    # ------------------------------------------------------------------ adding

    def add_rollout(
        self, rollout: Rollout | RolloutRecord, source: Source | None = None, *, now: float | None = None
    ) -> bool:
        """Add a rollout to its group, and return whether it was added. `source` is its place in the log, if any.

        A rollout is refused, and counted in `stats`, if its uid is known, it or its episode was cancelled, its policy
        version is not accepted, or its replica already has max_per_replica rollouts in the group. Raises RecordError if
        the rollout is invalid or of another environment, StoreError if its group sealed and cannot be written; the
        group then stays in memory, and the next call writes it.
        """
        if isinstance(rollout, RolloutRecord):
            rollout = as_rollout(rollout)
        if rollout.environment != (self.environment or rollout.environment):
            raise RecordError(
                f"rollout {rollout.uid!r} is of environment {rollout.environment!r}, but this store is of "
                f"{self.environment!r}; add it to the store of its environment"
            )
        if wrong := untyped_problems(rollout):
            raise RecordError(f"rollout {rollout.uid!r} was not added: {'; '.join(wrong)}")
        source = source or Source(_NO_PLACE, _NO_PLACE, rollout.uid)
        with self._lock:
            self._check_writable()
            self._write_sealed()
            at = self._clock() if now is None else now
            self._unwritten += self._open.due(at, source.partition)
            refusal = self._refusal(rollout, source.partition)
            self._counts[refusal or "added"] += 1
            if not refusal:
                self.environment = rollout.environment
                self._uids.add(rollout.uid)
                sealed = self._open.join(PlacedRollout(rollout, source), at)
                if sealed is not None:
                    self._unwritten.append(sealed)
                elif len(self._open) > self.config.capacity_groups:
                    self._shed(at)
            self._write_sealed()
            return not refusal

    add = add_rollout

    def add_rollouts(self, rollouts: Iterable[Rollout | RolloutRecord], *, now: float | None = None) -> int:
        """Add rollouts one after another, and return how many were added. Stops at an error of `add_rollout`."""
        return sum(self.add_rollout(rollout, now=now) for rollout in rollouts)

    def cancel(self, record: GroupCancelled, partition: int, *, now: float | None = None) -> None:
        """Apply a record that cancels members of a group. Raises RecordError if it is invalid, StoreError as
        `add_rollout` does."""
        if wrong := untyped_problems(record):
            raise RecordError(f"cancellation of group {record.group_id!r} was not applied: {'; '.join(wrong)}")
        with self._lock:
            self._check_writable()
            self._write_sealed()
            sealed = self._open.cancel(record, partition, self._clock() if now is None else now)
            if sealed is not None:
                self._unwritten.append(sealed)
            self._write_sealed()

    def poll(self, now: float | None = None, partition: int | None = None) -> int:
        """Seal the groups whose time is over, in one partition or in all, and return their number."""
        with self._lock:
            self._check_writable()
            self._write_sealed()
            due = self._open.due(self._clock() if now is None else now, partition)
            self._unwritten += due
            self._write_sealed()
            return len(due)

    def _refusal(self, rollout: Rollout, partition: int) -> str:
        """The reason why a rollout is refused; "" if it is accepted."""
        accepted = self.config.accept_policy_versions
        if rollout.uid in self._uids:
            return "duplicate"
        if accepted and rollout.policy_version not in accepted:
            return "version_not_accepted"
        if self._open.is_cancelled(rollout, partition):
            return "cancelled"
        return "replica_full" if self._open.is_full_for(rollout, partition) else ""

    def _shed(self, at: float) -> None:
        """Seal the oldest open group to stay within `capacity_groups`, or drop it if it is too small."""
        oldest = self._open.oldest(at)
        if isinstance(oldest, RolloutGroup):
            self._unwritten.append(oldest)
        else:
            self._counts["capacity"] += len(oldest)

    def _write_sealed(self) -> None:
        """Write sealed groups to disk and offer them to the maker. Raises StoreError; the next call then continues."""
        while self._unwritten:
            group = self._unwritten[0]
            if group.group_id not in self._index:
                name = part_name(group.group_id)
                if not self._index.has_file(name):
                    group_files.write_group(self.directory / name, group, self.config.compression)
                self._index.append(name, group)
            self._unwritten.pop(0)
            self._counts["sealed"] += 1
            if self._forwarding is not None:
                self._forwarding.offer(lambda group=group: group, self._index[group.group_id])  # type: ignore[misc]

    # ------------------------------------------------------------------ batches

    def create_and_store_batch(self, batch_size: int) -> str | None:
        """Make a batch and write it; return its id, or None if the batch maker has too few rollouts.

        Raises ConfigurationError if the store has no maker, StoreError if the batch cannot be written; then the next
        call writes that batch and ignores its own `batch_size`. After an error of the maker, here or while it was
        offered a group, every call raises StoreError until the store is opened again.
        """
        return None if (batch := self._next_batch(batch_size)) is None else batch.batch_id

    def sample(self, batch_size: int) -> list[RLExample] | None:
        """Make and store a batch as `create_and_store_batch` does, and return its examples, or None."""
        return None if (batch := self._next_batch(batch_size)) is None else list(batch.examples)

    def _next_batch(self, batch_size: int) -> StoredBatch | None:
        if batch_size < 1:
            raise ConfigurationError(f"a batch of {batch_size} examples; it must be at least 1")
        with self._lock:
            self._check_writable()
            if self._forwarding is None:
                raise ConfigurationError("this store has no batch maker; give it one when you open it")
            self._write_sealed()
            if self._unwritten_batch is None:
                next_batch = self._forwarding.create_batch(batch_size, len(self._batches))
                if next_batch is None:
                    return None
                examples, metadata = next_batch
                self._unwritten_batch = StoredBatch(
                    batch_id=str(uuid.uuid4()),
                    number=len(self._batches),
                    timestamp=self._clock(),
                    examples=tuple(examples),
                    metadata=metadata,
                )
            batch = self._unwritten_batch
            directory = self.directory / batch_files.FOLDER
            self._batches[batch.batch_id] = batch_files.write_batch(directory, batch, self.config.compression)
            self._unwritten_batch = None
            return batch

    def _stored_environment(self) -> str:
        """The environment of the content of a store that was opened without one; "" if it is empty."""
        for group in self._open.snapshot():
            return group.environment
        for entry in self._index:
            with contextlib.suppress(StoreError):
                return self._read(entry.file).environment
        return ""

    def _known_batches(self) -> tuple[dict[str, Path], set[str]]:
        """Return the files of batches by id, oldest first, and the uids that the batches delivered. A damaged file is
        listed last, and its rollouts may be delivered again."""
        numbered: list[tuple[float, Path]] = []
        delivered: set[str] = set()
        for path in (self.directory / batch_files.FOLDER).glob("batch_*.parquet"):
            number = math.inf
            try:
                number, sources = batch_files.read_sources(path)
                delivered.update(source.uid for source in sources)
            except StoreError as error:
                self._count_damaged(str(error))
            numbered.append((number, path))
        return {path.name.split("_")[1]: path for _number, path in sorted(numbered)}, delivered

    def _count_damaged(self, why: str) -> None:
        """Count and log a damaged file; the store opens without it, and reading it raises."""
        self._counts["damaged"] += 1
        event(logger, "stored_file_damaged", level=logging.ERROR, environment=self.environment, why=why)

    # ------------------------------------------------------------------ reading back

    def group_ids(self) -> list[str]:
        """Ids of the groups on disk, in the order they sealed."""
        with self._lock:
            return self._index.group_ids()

    def read_group(self, group_id: str) -> RolloutGroup:
        """Read a group from its file. Raises KeyError for an unknown id, StoreError for a damaged file."""
        with self._lock:
            name = self._index[group_id].file
        return self._read(name)

    def groups(self) -> Iterator[RolloutGroup]:
        """Iterate over the groups on disk, in the order they sealed, reading one file at a time.

        Raises StoreError at a damaged file; the iterator can then continue with the next file.
        """
        return map(self.read_group, self.group_ids())

    def batch_ids(self) -> list[str]:
        """Ids of the stored batches, oldest first."""
        with self._lock:
            return list(self._batches)

    def read_batch(self, batch_id: str) -> StoredBatch:
        """Read a batch from its file. Raises KeyError for an unknown id, StoreError for a damaged file."""
        with self._lock:
            path = self._batches[batch_id]
        return batch_files.read_batch(path)

    def _read(self, name: str) -> RolloutGroup:
        return group_files.read_group(self.directory / name)

    def size(self) -> int:
        """Number of groups on disk."""
        with self._lock:
            return len(self._index)

    def stats(self) -> dict[str, int]:
        """Return the numbers of groups, of batches and of rollouts that the batch maker holds; and, since the store was
        opened, the numbers of rollouts added, and refused or dropped by reason, of groups sealed and of files found
        damaged."""
        with self._lock:
            forwarding = {} if self._forwarding is None else self._forwarding.stats()
            return {
                "groups": len(self._index),
                "open_groups": len(self._open),
                "open_rollouts": self._open.rollouts,
                "batches": len(self._batches),
                **forwarding,
                **self._counts,
            }

    # ------------------------------------------------------------------ saving

    def flush(self) -> None:
        """Write everything to disk, including open groups, so that a reopened store has the same state. Raises
        StoreError."""
        with self._lock:
            saved = self.prepare()
            write_state(self.directory / STATE, replace(saved, open=()), saved.open)

    def prepare(self) -> SavedStore:
        """Write everything that `flush` writes, except the state; the caller saves the returned state with a position.
        Raises StoreError."""
        with self._lock:
            self._check_writable()
            self._write_sealed()
            self._index.flush()
            open_groups = tuple(self._open.snapshot())
            return SavedStore(sealed=len(self._index), cancelled=self._open.cancelled(), open=open_groups)

    def close(self, *, seal: bool = True) -> ClosingReport:
        """With `seal`, seal the open groups that have min_group_size rollouts; then `flush` and `release`.

        Reading still works. Closing again does nothing. If it raises StoreError, the store stays open.
        """
        with self._lock:
            if self._writer is None or not self._writer.held:
                return ClosingReport(sealed=0, kept=0)
            sealed = self._open.sealable(self._clock()) if seal else []
            self._unwritten += sealed
            self.flush()
            self.release()
            return ClosingReport(sealed=len(sealed), kept=len(self._open))

    def release(self) -> None:
        """Let another process write to the folder; anything not yet on disk is lost."""
        if self._writer is not None:
            self._writer.release()

    def _check_writable(self) -> None:
        if self._writer is None or not self._writer.held:
            why = "was opened read-only" if self._writer is None else "is closed, or another process writes to it"
            raise StoreError(f"the store in {self.directory} {why}; open it to write")

    def _read_state(self) -> SavedStore:
        path = self.directory / STATE
        if not path.exists():
            return SavedStore(sealed=-1)
        saved, open_groups = read_state(path, SavedStore, SavedGroup)
        return replace(saved, open=tuple(open_groups))

    def _refuse_part_of_view(self) -> None:
        """Raise StoreError if a view keeps the state of this folder: without it, the open groups would be deleted."""
        folder = self.directory.resolve()
        path = folder.with_name(group_files.VIEW_STATE)
        environments = read_state(path, SavedView, SavedGroup)[0].environments if path.exists() else {}
        if folder.name in map(group_files.folder_of, environments):
            raise StoreError(
                f"{folder} is part of a view of a run, whose state is in {path}; fill it with GroupStore or "
                "`rollstream groups`, open it with read_only=True, or give another directory"
            )

    def _reopen(self, saved: SavedStore) -> None:
        self._open.restore_cancelled(saved.cancelled)
        for group in saved.open:
            # A member with a known uid was sealed after this state was written, by a process that was killed before it
            # wrote the next state.
            for uid in self._open.restore(group, self._uids.__contains__):
                self._uids.add(uid)
        if len(self._index) > saved.sealed:
            # Cancelled members of a group that sealed since must not make the next group of its key smaller.
            self._open.forget_cancelled_of_closed()
