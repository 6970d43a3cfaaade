"""State of a grouping task after a committed transaction: together with the log, all that a fold needs to continue.

The journal holds the changes of each transaction, and occasional snapshots; `restored_state` adds them up. The metadata
of the committed offset names the journal record, so that position and state are committed as one.

A `Replay` checks that a restored state and the log agree while the log is read again from the watermark to the
position.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rollstream.consumers.grouping.config import GENERATION_STEP, GroupingConfig
from rollstream.consumers.grouping.core.drop_rules import Clocks
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import FateCount, FinishedGroup, JournalRecord, RateLevel
from rollstream.topics.records.journal import JournalCounts, from_ranges


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """State of one partition's fold at `position`, with the clocks there and before the watermark."""

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
    """Stream time before which finished groups are forgotten."""
    batch_number: int
    sequence: int
    """Sequence of the next journal record."""
    unfinished: frozenset[int] = frozenset()
    delivered: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    """Offsets from the watermark on that became dead letters without being decoded."""
    counts: tuple[FateCount, ...] = ()
    produced: tuple[FateCount, ...] = ()
    rates: tuple[RateLevel, ...] = ()
    """Levels of the rate quotas at the position."""
    finished_groups: tuple[FinishedGroup, ...] = ()
    """Groups that finished within the horizon, in the order in which they finished."""


def initial_record(partition: int, partitions: int, topic_id: str, config: GroupingConfig) -> JournalRecord:
    """Return the first journal record of a partition: an empty state under the first configuration.

    Raises ConfigurationError if its generation is so high that too few remain for later configurations.
    """
    if config.generation > GENERATION_STEP:
        raise ConfigurationError(
            f"grouping.generation is {config.generation}; a run must begin with at most {GENERATION_STEP}"
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


class JournalAccumulator:
    """Sum of consecutive journal records of one partition, one of which is a snapshot.

    Records before the snapshot contribute their finished groups only.
    """

    def __init__(self) -> None:
        self.last: JournalRecord | None = None
        self._unfinished: set[int] | None = None
        self._delivered: set[int] = set()
        self._groups: deque[FinishedGroup] = deque()
        self._counts = JournalCounts()

    def add(self, record: JournalRecord) -> None:
        """Add the next record. Raises StateRefused if a record before it is missing."""
        if self.last is not None and record.sequence != self.last.sequence + 1:
            raise StateRefused(
                f"journal[{record.partition}] goes from sequence {self.last.sequence} to {record.sequence}; "
                f"the records between them were deleted; start a new run"
            )
        self._groups += record.finished_groups
        while self._groups and self._groups[0].finished_ms < record.remembered_since_ms:
            self._groups.popleft()
        if record.snapshot:
            if record.part == 0:
                self._unfinished, self._delivered = set(), set()
            if self._unfinished is not None:
                self._unfinished.update(from_ranges(record.unfinished))
                self._delivered.update(from_ranges(record.delivered))
        elif self._unfinished is not None:
            self._unfinished.update(from_ranges(record.admitted))
            self._delivered.update(from_ranges(record.delivered))
            for finished in record.finished:
                self._unfinished.difference_update(from_ranges(finished.runs))
        self._counts.add(record)
        self.last = record

    def state(self) -> TaskState:
        """Return the state after the last record. Raises StateRefused if the records do not contain a whole state."""
        last = self.last
        if last is None or self._unfinished is None:
            raise StateRefused("the journal holds no snapshot to restore from; it was deleted or never written")
        if last.part != last.parts - 1:
            raise StateRefused(
                f"journal[{last.partition}] ends at sequence {last.sequence}, part {last.part + 1} of {last.parts} of "
                f"its transaction; the other parts were deleted, so start a new run"
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
            skipped=frozenset(offset for offset in last.skipped if offset >= last.watermark),
            counts=self._counts.counts,
            produced=self._counts.produced,
            rates=last.rates,
            finished_groups=tuple(self._groups),
        )


def restored_state(journal: Iterable[JournalRecord]) -> TaskState:
    """Return the state after the last record of `journal`. Raises StateRefused as `JournalAccumulator` does."""
    accumulator = JournalAccumulator()
    for record in journal:
        accumulator.add(record)
    return accumulator.state()


class Replay:
    """A state that is being restored, and its unfinished offsets that have not been read again yet."""

    def __init__(self, state: TaskState) -> None:
        self.ended = False
        self._state = state
        self._awaited = set(state.unfinished)
        self._topic = f"rollouts[{state.partition}]"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read again."""
        return not self._awaited and self._state.watermark == self._state.position

    def is_skipped(self, offset: int) -> bool:
        """Whether a record became a dead letter without being decoded."""
        return offset in self._state.skipped

    def meet(self, offset: int) -> bool:
        """Return whether an offset is still awaited, and stop awaiting it."""
        awaited = offset in self._awaited
        self._awaited.discard(offset)
        return awaited

    def check_offset(self, offset: int) -> None:
        """Raise StateRefused if an offset must not be read again."""
        if self.ended or offset >= self._state.position:
            raise StateRefused(
                f"offset {offset} of {self._topic} is not to be read again: the state was taken at "
                f"{self._state.position}"
            )

    def finished_too_early(self, offset: int) -> StateRefused:
        """Return the error for an unfinished offset that finishes when it is read again."""
        return StateRefused(f"offset {offset} of {self._topic} was unfinished, but is finished when read again")

    def unexpected_effect(self, offset: int) -> StateRefused:
        """Return the error for an offset that has an effect when it is read again."""
        return StateRefused(
            f"re-reading offset {offset} of {self._topic} had an effect that it did not have before: "
            f"the journal does not belong to this log; set kafka.max_record_bytes back if it was changed, go back to "
            f"the release that wrote it, or start a new run"
        )

    def end(self, clocks: Clocks) -> int:
        """End the replay and return the position to continue from.

        Raises StateRefused unless every unfinished offset was read again and `clocks` agree with the state.
        """
        state = self._state
        if self._awaited:
            raise StateRefused(
                f"{self._topic} no longer holds unfinished offsets {sorted(self._awaited)[:5]}; they were "
                f"deleted before they were batched; restore the topic or start a new run"
            )
        reached = (clocks.stream_time_ms, clocks.policy_version, clocks.config.generation)
        recorded = (state.stream_time_ms, state.policy_version, state.generation)
        if reached != recorded:
            raise StateRefused(
                f"re-reading {self._topic} gave stream time, policy version and generation {reached}, "
                f"but the journal says {recorded}; the records are not the ones that the journal was written for: "
                f"restore the topic, set kafka.max_record_bytes back if it was changed, or start a new run"
            )
        self.ended = True
        return state.position
