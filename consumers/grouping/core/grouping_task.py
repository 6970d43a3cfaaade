"""A grouping task: the fold of one partition, its journal, and the marks that it asks for on that partition.

It uses no Kafka client and gets the time from its caller, so that tests can run it without a broker.
"""

from dataclasses import fields
from typing import NamedTuple

from rollstream.consumers.grouping.config import ForeignConfiguration, GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core.configuration_marks import BATCH_BYTES_LIMIT, VERSION_STEP
from rollstream.consumers.grouping.core.effects import Effects, InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.task_journal import JournalPointers
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Mark


class TaskCommit(NamedTuple):
    """One task's part of a transaction."""

    effects: Effects
    journal: JournalPointers
    leader_epoch: int = -1
    """Leader epoch of the last record read; -1 if it is unknown."""


class GroupingTask:
    """A restored fold with its journal."""

    def __init__(
        self,
        fold: Fold,
        journal: JournalPointers,
        config: GrouperConfig,
        author: str,
        largest_batch: int = BATCH_BYTES_LIMIT,
    ) -> None:
        """`largest_batch` is the greatest `grouping.batch_bytes` that this process has room for."""
        self.fold = fold
        self.partition = fold.partition
        self.at_end = False
        """Whether every committed record of the partition was read."""
        self._end_read = -1
        """Highest end of the partition that was reached. Offsets between the position and this end hold no records."""
        self._journal = journal
        self._config = config
        self._author = author
        self._largest_batch = largest_batch
        self._leader_epoch = journal.leader_epoch
        self._records_since_snapshot = 0
        self._marked_version = fold.policy_version
        self._marked_generation = fold.config.generation
        self._marked_deadline_ms = 0
        self._compared: GroupingConfig | None = None
        self._ignored: dict[str, str] = {}

    @property
    def journal_offset(self) -> int:
        """Offset of the task's newest journal record."""
        return self._journal.newest

    def apply(self, record: InputRecord, leader_epoch: int | None = None) -> None:
        """Read a record, or ignore it if it was read before: a client may repeat records after a rebalance.

        `leader_epoch` is the leader epoch in which the record was appended, if it is known.

        Raises StateRefused if the record cannot be read here; the message says how to continue without it.
        """
        if record.offset < self.fold.position:
            return
        self.at_end = False
        self._leader_epoch = -1 if leader_epoch is None else leader_epoch
        self._records_since_snapshot += 1
        before = self.fold.config
        try:
            self.fold.apply(record)
            if self.fold.config is not before:
                self._check_room()
        except ForeignConfiguration as error:
            raise StateRefused(f"{error}; {self._skip_remedy(record, 'if none of your programs wrote it')}") from error
        except Exception as error:
            # A batch maker, or code of ours, is mistaken: the traceback says where, and the note at which record.
            error.add_note(
                f"offset {record.offset} of rollouts[{self.partition}] ends grouping; fix the cause, or "
                f"{self._skip_remedy(record, 'if that is not possible')}"
            )
            raise

    def reach_end(self, end: int) -> None:
        """Note that every committed record before `end`, the end of the partition, was read."""
        self.at_end = True
        self._end_read = max(self._end_read, end)

    def lag(self, end: int) -> int:
        """Return the number of unread offsets, given the known end of the partition; 0 if only transaction markers
        lie after the last record that was read."""
        return 0 if end <= self._end_read else max(0, end - self.fold.position)

    def _check_room(self) -> None:
        """Raise ForeignConfiguration if kafka.max_record_bytes has no room for the batches of the configuration."""
        if self.fold.config.batch_bytes > self._largest_batch:
            raise ForeignConfiguration(
                f"the log puts generation {self.fold.config.generation} in force, with grouping.batch_bytes "
                f"{self.fold.config.batch_bytes}, but kafka.max_record_bytes only has room for {self._largest_batch}: "
                f"raise kafka.max_record_bytes",
                self.fold.config.core_version,
            )

    def _skip_remedy(self, record: InputRecord, condition: str) -> str:
        place = f"{self.partition}:{record.offset}"
        return f"{condition}, skip the record: `rollstream role group skip {place} --reason ...`"

    def prepare_commit(self, *, closing: bool = False) -> TaskCommit:
        """Return the effects so far for the next transaction, with a snapshot if one is due."""
        snapshot = closing or self._records_since_snapshot >= self._config.snapshot_every
        if snapshot:
            self._records_since_snapshot = 0
        return TaskCommit(self.fold.prepare_commit(snapshot=snapshot), self._journal, self._leader_epoch)

    def ignored_settings(self, wanted: GroupingConfig) -> dict[str, str]:
        """Return the settings that differ from the log's under the same generation, each with a description.

        The settings in the log are in force.
        """
        config = self.fold.config
        if config is not self._compared:
            self._compared = config
            same = wanted.generation == config.generation
            names = [f.name for f in fields(config)] if same else []
            self._ignored = {
                name: f"{getattr(wanted, name)!r} here, {getattr(config, name)!r} in the log"
                for name in names
                if getattr(wanted, name) != getattr(config, name)
            }
        return self._ignored

    def due_marks(self, now_ms: int, newest_version: int, wanted: GroupingConfig) -> list[Mark]:
        """Return the marks to append now: for a new policy version, a higher generation or an overdue deadline.

        Raises ConfigurationError if the mark of `wanted` would be an invalid record.
        """
        marks: list[Mark] = []
        # A larger step takes several marks. The next mark is due after this mark has been read.
        version = min(newest_version, max(self.fold.policy_version, 0) + VERSION_STEP)
        if version > max(self._marked_version, self.fold.policy_version):
            self._marked_version = version
            marks.append(self._mark("policy_version", now_ms, policy_version=version))
        if wanted.generation > max(self._marked_generation, self.fold.config.generation):
            mark = self._mark("configuration", now_ms, generation=wanted.generation, configuration=wanted.to_json())
            if problem := self.fold.content_outcome(mark).problem:
                raise ConfigurationError(f"the given configuration cannot be put in force: {problem}")
            self._marked_generation = wanted.generation
            marks.append(mark)
        due_ms = self.fold.next_deadline_ms
        # The broker's clock may lag behind ours. The mark may then be appended before the deadline, and is repeated.
        rested = not 0 <= now_ms - self._marked_deadline_ms < self._config.mark_interval_s * 1000
        if self.at_end and due_ms is not None and due_ms <= now_ms and rested:
            self._marked_deadline_ms = now_ms
            marks.append(self._mark("deadline", now_ms))
        return marks

    def mark_failed(self) -> None:
        """Ask again for a mark that was not delivered."""
        self._marked_version = self.fold.policy_version
        self._marked_generation = self.fold.config.generation

    def _mark(
        self, kind: str, now_ms: int, *, policy_version: int = -1, generation: int = -1, configuration: str = ""
    ) -> Mark:
        return Mark(
            kind=kind,  # type: ignore[arg-type]
            policy_version=policy_version,
            generation=generation,
            configuration=configuration,
            wall_time=now_ms / 1000,
            author=self._author,
        )
