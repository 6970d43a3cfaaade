"""A grouping task: one partition's fold, and what it wants said on its own partition (marks).

Knows nothing of Kafka clients; time is given to it, so that tests can.
"""

from dataclasses import fields

from consumers.grouping.changes import Record
from consumers.grouping.config import ForeignConfiguration, GrouperConfig, GroupingConfig
from consumers.grouping.configuring import BATCH_BYTES_LIMIT, VERSION_STEP
from consumers.grouping.fold import Fold
from consumers.grouping.publisher import Part
from consumers.grouping.restore import Journal
from topics.errors import ConfigurationError, RollstreamError, StateRefused
from topics.records import Mark


class GroupingTask:
    """A restored fold with its journal."""

    def __init__(
        self,
        fold: Fold,
        journal: Journal,
        config: GrouperConfig,
        author: str,
        largest_batch: int = BATCH_BYTES_LIMIT,
    ) -> None:
        """`largest_batch` is the greatest `grouping.batch_bytes` this process has room for."""
        self.fold = fold
        self.partition = fold.partition
        self.at_end = False
        """Whether every committed record of the partition was read."""
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

    def apply(self, record: Record, leader_epoch: int | None = None) -> None:
        """Read a record; one read before (after a rebalance the client may repeat some) is passed over.

        `leader_epoch` is that of the broker who took it, where it is known.

        Raises StateRefused for one that cannot be read here: how to go on without it is in the message.
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
            raise StateRefused(f"{error}; {self._way_on(record, 'where nobody of yours wrote it')}") from error
        except (RollstreamError, MemoryError):
            raise
        except Exception as error:
            what = (
                f"offset {record.offset} of rollouts[{self.partition}] ends grouping ({type(error).__name__}: {error})"
            )
            raise StateRefused(f"{what}; mend what raised it, or {self._way_on(record, 'if it cannot be')}") from error

    def _check_room(self) -> None:
        """What is checked of the configuration a process starts with, of one that the log puts in force."""
        if self.fold.config.batch_bytes > self._largest_batch:
            raise ForeignConfiguration(
                f"the log puts generation {self.fold.config.generation} in force, with grouping.batch_bytes "
                f"{self.fold.config.batch_bytes}, of which kafka.max_record_bytes has room for {self._largest_batch}: "
                f"raise it",
                self.fold.config.core_version,
            )

    def _way_on(self, record: Record, when: str) -> str:
        place = f"{self.partition}:{record.offset}"
        return f"{when}, have the record left out: `rollstream group skip {place} --reason ...`"

    def take(self, *, closing: bool = False) -> Part:
        """The effects so far as a part of the next transaction, with a snapshot when one is due."""
        snapshot = closing or self._records_since_snapshot >= self._config.snapshot_every
        if snapshot:
            self._records_since_snapshot = 0
        output = self.fold.take(snapshot=snapshot)
        return Part(output, self._journal, self._leader_epoch)

    def ignored_settings(self, wanted: GroupingConfig) -> dict[str, str]:
        """How settings differ from those in the log though the generation is the same, so that the log's are in force.

        The core version is not among them: a run keeps the one it began with, and a release has its own default.
        """
        config = self.fold.config
        if config is not self._compared:
            self._compared = config
            same = wanted.generation == config.generation
            names = [f.name for f in fields(config) if f.name != "core_version"] if same else []
            self._ignored = {
                name: f"{here!r} here, {in_log!r} in the log"
                for name in names
                if (here := getattr(wanted, name)) != (in_log := getattr(config, name))
            }
        return self._ignored

    def due_marks(self, now_ms: int, newest_version: int, wanted: GroupingConfig) -> list[Mark]:
        """Marks to append now: for a new policy version, a higher configuration generation, an overdue deadline.

        Raises ConfigurationError for a configuration that would be an invalid record.
        """
        marks: list[Mark] = []
        # What is further than a step is reached in several: the next when this one was read.
        version = min(newest_version, max(self.fold.policy_version, 0) + VERSION_STEP)
        if version > max(self._marked_version, self.fold.policy_version):
            self._marked_version = version
            marks.append(self._mark("policy_version", now_ms, policy_version=version))
        if wanted.generation > max(self._marked_generation, self.fold.config.generation):
            mark = self._mark("configuration", now_ms, generation=wanted.generation, configuration=wanted.to_json())
            if problem := self.fold.judge(mark).problem:
                raise ConfigurationError(f"the configuration given cannot be put in force: {problem}")
            self._marked_generation = wanted.generation
            marks.append(mark)
        due_ms = self.fold.next_deadline_ms
        # The broker's clock may lag ours: a mark may come too early by it, and is then repeated.
        rested = not 0 <= now_ms - self._marked_deadline_ms < self._config.mark_interval_s * 1000
        if self.at_end and due_ms is not None and due_ms <= now_ms and rested:
            self._marked_deadline_ms = now_ms
            marks.append(self._mark("deadline", now_ms))
        return marks

    def mark_failed(self) -> None:
        """A mark was not delivered: ask for it again."""
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
