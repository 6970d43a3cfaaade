"""TaskState: everything a fold needs besides the log itself to go on where a committed transaction left it.

It is not stored as such: the journal holds what each transaction changed, and a snapshot now and then; `restore`
adds them up. The commit metadata of the group's offset names the journal record, so position and state are one fact.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from consumers.grouping.changes import CORE_VERSION
from consumers.grouping.config import GENERATION_STEP, GroupingConfig
from consumers.grouping.runs import from_runs
from topics.errors import ConfigurationError, StateRefused
from topics.journal_counts import JournalCounts
from topics.records import FateCount, FinishedGroup, JournalRecord


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """State of one partition's fold at `position`; clocks are also given as before the watermark."""

    partition: int
    partitions: int
    topic_id: str
    position: int
    watermark: int
    watermark_stream_time_ms: int
    watermark_policy_version: int
    watermark_configuration: str
    stream_time_ms: int
    policy_version: int
    generation: int
    remembered_since_ms: int
    """Groups that finished before this stream time are forgotten."""
    batch_number: int
    sequence: int
    """Sequence of the next journal record."""
    unfinished: frozenset[int] = frozenset()
    delivered: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    """Offsets from the watermark on that were left out unread."""
    counts: tuple[FateCount, ...] = ()
    produced: tuple[FateCount, ...] = ()
    finished_groups: tuple[FinishedGroup, ...] = ()
    """Groups that finished within the horizon, in the order they did."""


class CommitMetadata(NamedTuple):
    """What travels with a committed offset of `rollouts`."""

    journal: int
    """Offset of the task's newest journal record."""
    snapshot: int
    """Offset of its newest snapshot."""
    oldest: int
    """Offset of the oldest journal record still within the horizon."""

    def encode(self) -> str:
        return json.dumps({"v": 1, **self._asdict()})

    @classmethod
    def decode(cls, text: str | None, where: str) -> "CommitMetadata":
        """Read it back. Raises StateRefused for anything this version did not write."""
        try:
            values = json.loads(text or "")
            if values.pop("v") != 1:
                raise ValueError("another version")
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateRefused(
                f"the offset committed for {where} carries {text!r} instead of rollstream's metadata ({error}); "
                f"another program committed it: stop it, and commit again with `rollstream group recover`"
            ) from error


def initial(partition: int, partitions: int, topic_id: str, config: GroupingConfig) -> JournalRecord:
    """Generation 0: the first journal record of a partition, an empty state under the first configuration.

    Raises ConfigurationError where its generation leaves too few for those after it.
    """
    if config.generation > GENERATION_STEP:
        raise ConfigurationError(
            f"grouping.generation is {config.generation}; a run begins with one of at most {GENERATION_STEP}"
        )
    return JournalRecord(
        partition=partition,
        sequence=0,
        core_version=CORE_VERSION,
        topic_id=topic_id,
        partitions=partitions,
        begin=0,
        position=0,
        watermark=0,
        watermark_stream_time_ms=-1,
        watermark_policy_version=-1,
        watermark_generation=config.generation,
        watermark_configuration=config.to_json(),
        stream_time_ms=-1,
        policy_version=-1,
        generation=config.generation,
        remembered_since_ms=-1,
        batch_number=0,
        snapshot=True,
    )


class JournalSum:
    """Adds up consecutive journal records of one partition, a snapshot among them.

    Records before the snapshot only tell which groups finished.
    """

    def __init__(self) -> None:
        self.last: JournalRecord | None = None
        self._unfinished: set[int] | None = None
        self._delivered: set[int] = set()
        self._groups: deque[FinishedGroup] = deque()
        self._counts = JournalCounts()

    def add(self, record: JournalRecord) -> None:
        """Take in the next record. Raises StateRefused when one is missing before it."""
        if self.last is not None and record.sequence != self.last.sequence + 1:
            raise StateRefused(
                f"journal[{record.partition}] goes from sequence {self.last.sequence} to {record.sequence}; "
                f"records between were deleted, start a new run"
            )
        self._groups += record.finished_groups
        while self._groups and self._groups[0].finished_ms < record.remembered_since_ms:
            self._groups.popleft()
        if record.snapshot:
            if record.part == 0:
                self._unfinished, self._delivered = set(), set()
            if self._unfinished is not None:
                self._unfinished.update(from_runs(record.unfinished))
                self._delivered.update(from_runs(record.delivered))
        elif self._unfinished is not None:
            self._unfinished.update(from_runs(record.admitted))
            self._delivered.update(from_runs(record.delivered))
            for finished in record.finished:
                self._unfinished.difference_update(from_runs(finished.runs))
        self._counts.add(record)
        self.last = record

    def state(self) -> TaskState:
        """The state after the last record. Raises StateRefused where the records do not give one."""
        last = self.last
        if last is None or self._unfinished is None:
            raise StateRefused("the journal holds no snapshot to restore from; it was deleted or never written")
        if last.part != last.parts - 1:
            raise StateRefused(
                f"journal[{last.partition}] ends at sequence {last.sequence}, part {last.part + 1} of {last.parts} of "
                f"its transaction; the rest was deleted, start a new run"
            )
        return TaskState(
            partition=last.partition,
            partitions=last.partitions,
            topic_id=last.topic_id,
            position=last.position,
            watermark=last.watermark,
            watermark_stream_time_ms=last.watermark_stream_time_ms,
            watermark_policy_version=last.watermark_policy_version,
            watermark_configuration=last.watermark_configuration,
            stream_time_ms=last.stream_time_ms,
            policy_version=last.policy_version,
            generation=last.generation,
            remembered_since_ms=last.remembered_since_ms,
            batch_number=last.batch_number,
            sequence=last.sequence + 1,
            unfinished=frozenset(self._unfinished),
            delivered=frozenset(self._delivered & self._unfinished),
            skipped=frozenset(last.skipped),
            counts=self._counts.counts,
            produced=self._counts.produced,
            finished_groups=tuple(self._groups),
        )


def restore(journal: Iterable[JournalRecord]) -> TaskState:
    """The state after the last of `journal`. Raises StateRefused as `JournalSum` does."""
    added = JournalSum()
    for record in journal:
        added.add(record)
    return added.state()
