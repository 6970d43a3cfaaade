"""The store of one environment's groups and batches: collects rollouts into groups, seals them onto disk, forwards them
to a batch maker, and writes the batches it makes.

A group that `add_rollout`, `poll` or `flush` has sealed is on disk when the call returns. Safe from several threads.
"""

import contextlib
import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from consumers.buffers import batch_files, group_files
from consumers.buffers.batch_files import StoredBatch
from consumers.buffers.files import (
    DirectoryLock,
    StoreError,
    lock_directory,
    read_json,
    remove,
    remove_unfinished,
    write_json,
)
from consumers.buffers.forwarding import Forwarding
from consumers.buffers.group_config import GroupStoreConfig
from consumers.buffers.group_files import Placed, RolloutGroup, part_name
from consumers.buffers.group_index import GroupIndex, KnownUids
from consumers.buffers.open_groups import Cancelled, OpenGroups
from consumers.buffers.rollout_record import RolloutRecord, as_rollout
from consumers.closing import Closing
from consumers.grouping.batch_maker import BatchMaker
from topics.errors import ConfigurationError, RecordError
from topics.examples import RLExample, Source
from topics.logs import event
from topics.records import GroupCancelled, Rollout
from topics.validation import problems

logger = logging.getLogger(__name__)
LOCK = ".lock"
_STATE = "open.json"
_NO_PLACE = -1
"""Partition and offset of a rollout that was added by hand."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a store holds beside its sealed groups, as of one moment."""

    open_file: str
    """Name of the file of its open groups; empty where there are none."""
    sealed: int
    """Groups that had sealed; -1 where all that lie on disk count."""
    cancelled: tuple[Cancelled, ...] = ()
    """Members of open groups that will not come."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """What became of the groups that were open when a store was closed."""

    sealed: int
    """Groups that had min_group_size."""
    kept: int
    """Groups too small for that: in the store's file of open groups, for the next time it is opened."""


class GroupReplayBuffer(Closing):
    """One environment's groups and batches below `root`, in a folder of its own.

    Opened again it goes on where it was: with the groups that were open when it was last flushed or closed, knowing
    every rollout that lies on disk, and with what no batch has delivered given to the batch maker again. It is the
    only writer of its folder until `close`, or until nobody refers to it any more.

    With `read_only` it shows the groups and batches that were on disk when it was opened, and leaves the folder as it
    is: it may be opened beside a writer.
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
        resume: Saved | None = None,
        read_only: bool = False,
    ) -> None:
        """Without an `environment`, groups lie below `root_path` itself, of the environment of the first rollout.
        `compression` stands for that of `config`.

        `clock` is asked for the time, in seconds since the Unix epoch, where a call is not told it.

        `resume` is for callers that keep the position in a log: the store becomes what it was then, and groups that
        sealed later are not written again when they seal again.

        Raises StoreError for files that are not whole, or where another writer has the folder; ConfigurationError for
        a batch maker of a store that is read only.
        """
        if read_only and batch_maker is not None:
            raise ConfigurationError("a store that is read only makes no batches; leave the batch maker out")
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

    def _start(self, resume: Saved | None) -> None:
        if self._writer is not None:
            remove_unfinished(self.directory)
            remove_unfinished(self.directory / batch_files.FOLDER)
        saved = resume or self._saved()
        self._counts: Counter[str] = Counter()
        self._unwritten: list[RolloutGroup] = []
        self._unwritten_batch: StoredBatch | None = None
        self._index = GroupIndex(self.directory, saved.sealed)
        self._uids = KnownUids(self._index)
        for what in self._index.damaged:
            self._damaged(what)
        self._batches, delivered = self._known_batches()
        self._forwarding = None
        if self._maker is not None:
            self._forwarding = Forwarding(self._maker, self.config, delivered)
            for entry in self._index:
                try:
                    self._forwarding.offer(partial(self._read, entry.file), entry)
                except StoreError as error:
                    self._damaged(str(error))
        self._open_file = saved.open_file
        self._open = OpenGroups(self.config)
        if self._writer is not None:
            self._reopen(saved)
        self.environment = self.environment or self._stored_environment()

    # ------------------------------------------------------------------ adding

    def add_rollout(
        self, rollout: Rollout | RolloutRecord, source: Source | None = None, *, now: float | None = None
    ) -> bool:
        """Take a rollout into its group; whether it was taken. `source` is where it lies on the log, if it does.

        Not taken, and counted in `stats`: a uid the store has, a policy version that is not accepted, one rollout too
        many of a replica. Raises RecordError for a senseless one or another environment's, StoreError when its group
        sealed and cannot be written: the group is then kept, and written by whatever comes next.
        """
        if isinstance(rollout, RolloutRecord):
            rollout = as_rollout(rollout)
        if rollout.environment != (self.environment or rollout.environment):
            raise RecordError(
                f"rollout {rollout.uid!r} is of environment {rollout.environment!r}, this store of {self.environment!r}"
            )
        if wrong := problems(rollout):
            raise RecordError(f"rollout {rollout.uid!r} was not added: {'; '.join(wrong)}")
        source = source or Source(_NO_PLACE, _NO_PLACE, rollout.uid)
        with self._lock:
            self._check_writable()
            self._write_sealed()
            at = self._clock() if now is None else now
            self._unwritten += self._open.due(at, source.partition)
            why = self._refused(rollout, source.partition)
            self._counts[why or "added"] += 1
            if not why:
                self.environment = rollout.environment
                self._uids.add(rollout.uid)
                sealed = self._open.join(Placed(rollout, source), at)
                if sealed is not None:
                    self._unwritten.append(sealed)
                elif len(self._open) > self.config.capacity_groups:
                    self._shed(at)
            self._write_sealed()
            return not why

    add = add_rollout

    def add_rollouts(self, rollouts: Iterable[Rollout | RolloutRecord], *, now: float | None = None) -> int:
        """Take rollouts one after another; how many were taken. Raises as `add_rollout` does, at the first."""
        return sum(self.add_rollout(rollout, now=now) for rollout in rollouts)

    def cancel(self, record: GroupCancelled, partition: int, *, now: float | None = None) -> None:
        """Take from the log that members of a group will not come. Raises StoreError as `add_rollout` does."""
        with self._lock:
            self._check_writable()
            self._write_sealed()
            sealed = self._open.cancel(record, partition, self._clock() if now is None else now)
            if sealed is not None:
                self._unwritten.append(sealed)
            self._write_sealed()

    def poll(self, now: float | None = None, partition: int | None = None) -> int:
        """Seal the groups whose time is over, of one partition or all; how many. Nothing needs to arrive for it."""
        with self._lock:
            self._check_writable()
            self._write_sealed()
            due = self._open.due(self._clock() if now is None else now, partition)
            self._unwritten += due
            self._write_sealed()
            return len(due)

    def _refused(self, rollout: Rollout, partition: int) -> str:
        accepted = self.config.accept_policy_versions
        if rollout.uid in self._uids:
            return "duplicate"
        if accepted and rollout.policy_version not in accepted:
            return "version_not_accepted"
        if self._open.is_cancelled(rollout, partition):
            return "cancelled"
        return "replica_full" if self._open.is_full_for(rollout, partition) else ""

    def _shed(self, at: float) -> None:
        """There are too many open groups: the oldest seals, or goes where it is too small for that."""
        oldest = self._open.oldest(at)
        if isinstance(oldest, RolloutGroup):
            self._unwritten.append(oldest)
        else:
            self._counts["capacity"] += len(oldest)

    def _write_sealed(self) -> None:
        """Put sealed groups on disk, then into the maker. Raises StoreError; what is left is written the next time."""
        while self._unwritten:
            group = self._unwritten[0]
            if group.group_id not in self._index:
                name = part_name(group.group_id)
                if not self._index.has_file(name):
                    group_files.write_groups(self.directory / name, [group], self.config.compression)
                self._index.append(name, group)
            self._unwritten.pop(0)
            self._counts["sealed"] += 1
            if self._forwarding is not None:
                self._forwarding.offer(lambda group=group: group, self._index[group.group_id])  # type: ignore[misc]

    # ------------------------------------------------------------------ batches

    def create_and_store_batch(self, batch_size: int) -> str | None:
        """Have the batch maker make a batch, and write it: its id, or None when the maker has too little for one.

        Raises ConfigurationError for a store without a maker, StoreError when the batch cannot be written: the next
        call writes that batch, whatever size it asks for.
        """
        return None if (batch := self._next_batch(batch_size)) is None else batch.batch_id

    def sample(self, batch_size: int) -> list[RLExample] | None:
        """The examples of the next batch, which is stored. Returns None and raises as `create_and_store_batch` does."""
        return None if (batch := self._next_batch(batch_size)) is None else list(batch.examples)

    def _next_batch(self, batch_size: int) -> StoredBatch | None:
        if batch_size < 1:
            raise ConfigurationError(f"a batch of {batch_size} examples; it must be at least 1")
        with self._lock:
            self._check_writable()
            if self._forwarding is None:
                raise ConfigurationError("this store has no batch maker to make a batch; give it one when it is opened")
            self._write_sealed()
            if self._unwritten_batch is None:
                made = self._forwarding.create_batch(batch_size, len(self._batches))
                if made is None:
                    return None
                examples, metadata = made
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
        """The environment of what a store that was opened without one holds; "" while that is nothing."""
        for group in self._open.snapshot():
            return group.environment
        for entry in self._index:
            with contextlib.suppress(StoreError):
                return self._read(entry.file).environment
        return ""

    def _known_batches(self) -> tuple[dict[str, Path], set[str]]:
        """Files of batches by id, oldest first, and the uids these delivered. A damaged one keeps its place at the end:
        what it delivered may be delivered again."""
        found: list[tuple[float, Path]] = []
        delivered: set[str] = set()
        for path in (self.directory / batch_files.FOLDER).glob("batch_*.parquet"):
            number = math.inf
            try:
                number, sources = batch_files.read_sources(path)
                delivered.update(source.uid for source in sources)
            except StoreError as error:
                self._damaged(str(error))
            found.append((number, path))
        return {path.name.split("_")[1]: path for _number, path in sorted(found)}, delivered

    def _damaged(self, why: str) -> None:
        """One bad file closes no store: it is counted and logged, and reading it raises."""
        self._counts["damaged"] += 1
        event(logger, "stored_file_damaged", level=logging.ERROR, environment=self.environment, why=why)

    # ------------------------------------------------------------------ reading back

    def group_ids(self) -> list[str]:
        """Ids of the groups on disk, in the order they sealed."""
        with self._lock:
            return self._index.group_ids()

    def read_group(self, group_id: str) -> RolloutGroup:
        """A group from its file. Raises KeyError for an unknown id, StoreError for a file that is not whole."""
        with self._lock:
            name = self._index[group_id].file
        return self._read(name)

    def groups(self) -> Iterator[RolloutGroup]:
        """Every group on disk, in the order they sealed, one at a time.

        Raises StoreError at one whose file is damaged; asked for the next, it goes on.
        """
        return map(self.read_group, self.group_ids())

    def batch_ids(self) -> list[str]:
        """Ids of the batches stored, oldest first."""
        with self._lock:
            return list(self._batches)

    def read_batch(self, batch_id: str) -> StoredBatch:
        """A batch from its file. Raises KeyError for an unknown id, StoreError for a file that is not whole."""
        with self._lock:
            path = self._batches[batch_id]
        return batch_files.read_batch(path)

    def _read(self, name: str) -> RolloutGroup:
        [group] = group_files.read_groups(self.directory / name)
        return group

    def size(self) -> int:
        """Groups on disk."""
        with self._lock:
            return len(self._index)

    def stats(self) -> dict[str, int]:
        """Groups and batches there are, and counts since it was opened: rollouts added, and those that were not taken
        or left without a batch, by reason."""
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

    # ------------------------------------------------------------------ keeping

    def flush(self) -> None:
        """Put everything on disk, open groups too, so that it can be opened again as it is. Raises StoreError."""
        with self._lock:
            saved = self.prepare()
            write_json(self.directory / _STATE, {"format": 1, "open_file": saved.open_file})
            self.committed(saved)

    def prepare(self) -> Saved:
        """Write what `flush` writes, but for the note that it counts: for who writes that note with a position."""
        with self._lock:
            self._check_writable()
            self._write_sealed()
            self._index.flush()
            groups = self._open.snapshot()
            name = f"open-{uuid.uuid4()}.parquet" if groups else ""
            if groups:
                group_files.write_groups(self.directory / name, groups, self.config.compression)
            return Saved(open_file=name, sealed=len(self._index), cancelled=self._open.cancelled())

    def committed(self, saved: Saved) -> None:
        """What was prepared counts from now on: remove what came before it."""
        with self._lock:
            if self._open_file and self._open_file != saved.open_file:
                remove(self.directory / self._open_file)
            self._open_file = saved.open_file

    def close(self, *, seal: bool = True) -> Closed:
        """Seal the open groups that have min_group_size, unless told not to, `flush`, and let others write there.

        Reading goes on. Closing again does nothing. Raises StoreError; the store is then still open.
        """
        with self._lock:
            if self._writer is None or not self._writer.held:
                return Closed(sealed=0, kept=0)
            sealed = self._open.sealable(self._clock()) if seal else []
            self._unwritten += sealed
            self.flush()
            self.release()
            return Closed(sealed=len(sealed), kept=len(self._open))

    def release(self) -> None:
        """Let others write in the folder; what is not on disk by now is lost."""
        if self._writer is not None:
            self._writer.release()

    def _check_writable(self) -> None:
        if self._writer is None or not self._writer.held:
            why = "was opened to be read only" if self._writer is None else "is closed, or another process has it"
            raise StoreError(f"the store in {self.directory} {why}; open it to write")

    def _saved(self) -> Saved:
        path = self.directory / _STATE
        return Saved(open_file=read_json(path)["open_file"] if path.exists() else "", sealed=-1)

    def _reopen(self, saved: Saved) -> None:
        name = saved.open_file
        self._open.restore_cancelled(saved.cancelled)
        for path in self.directory.glob("open-*.parquet"):
            if path.name != name:
                remove(path)
        if not name:
            return
        try:
            groups = group_files.read_groups(self.directory / name)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.directory / name} is gone, which held the open groups; restore it, or begin an empty directory"
            ) from error
        for group in groups:
            # The others have sealed since it was written, by a process that was killed before it wrote it again.
            members = tuple(member for member in group.members if member.rollout.uid not in self._uids)
            if members:
                for member in members:
                    self._uids.add(member.rollout.uid)
                self._open.restore(replace(group, members=members))
