"""Flow control: producers never run further ahead of the learner than its policy lag allows. Pure, without I/O.

A rollout is outstanding if it is produced and neither dropped, dead-lettered, trained on nor skipped. The number T of
outstanding rollouts stays at most `limit`, although no worker knows the state of the others. The limit is
(max_policy_lag + 1) * rollouts_per_step minus the rollouts that can wait on the partitions while others overtake them,
so that hardly any rollout is stale when it is trained on:

- A worker sees S, the outstanding rollouts that grouping has read (from the journal, `batch-index` and `steps`), and
  knows its own m: the rollouts that it started, sent or not, and that grouping has not read. So T = S + the sum of all
  m.
- It starts a group of g only while m + g <= share and S + m + g + (n - 1) * share <= limit, which assumes that the
  other n - 1 workers hold their full share. So every start leaves T <= limit, and between starts T only falls.
  (Splitting the free capacity, m + g <= (limit - S) / n, would not work: while a slow worker holds its m, the others
  would raise S to the limit and leave it no room.)
- share = (limit - floor) / n, or less if a worker never has that many rollouts in flight. The floor is the number of
  rollouts that can wait in the pipeline until more arrive. At or below the floor each worker can fill its share
  whatever the others do, so a worker that died holding its share never stalls the others; above the floor the learner
  makes progress by itself.

S is as fresh as the journal: a worker that sees an old S can exceed the limit by at most its share.

While a group is played, the learner consumes rollouts that were started later. The largest such number among the
worker's newest groups is subtracted from the limit, which then stays at least half-way between `needed` and the full
limit; this also lowers the worker's share. A quota keeps a fast
environment from dominating the mixture: the same rule applies to the environment's own S and m, with share and limit
multiplied by the quota, except that each worker may have at least one group in flight. The subtraction and the quotas
apply only while a whole step is waiting for the learner, so neither starves it.

Rollouts that wait for a label count in their worker's m from the start of their group until grouping has read them
labeled or cancelled. The time they wait counts like the time they are played.
"""

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rollstream.producers.config import CapacityConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records.fates import BATCHED, DEAD_LETTERED, DROPPED, fate_and_reason
from rollstream.topics.records.journal import JournalCounts

_GROUPS_REMEMBERED = 64
_UNKNOWN = -1


@dataclass(frozen=True)
class PartitionProgress:
    """Progress of grouping on a partition: its position, and rollouts since the start of the run, as its journal counts
    them."""

    position: int
    produced: int
    finished_untrained: int
    batched: int = 0

    @classmethod
    def of(cls, position: int, journal: JournalCounts) -> "PartitionProgress":
        """Sum the counts over environments. Dead letters count as produced, so they count as finished, too."""
        counts = journal.counts
        return cls(
            position=position,
            produced=sum(count.rollouts for count in journal.produced),
            finished_untrained=sum(
                count.rollouts for count in counts if fate_and_reason(count.fate)[0] in (DROPPED, DEAD_LETTERED)
            ),
            batched=sum(count.rollouts for count in counts if count.fate == BATCHED),
        )


@dataclass(frozen=True)
class LabelingPosition:
    """Progress of labeling on a partition."""

    position: int
    """Next offset of `unlabelled` to be labeled."""
    written: int
    """Offset after the newest record that labeling wrote to the partition of `rollouts`; 0 if there is none."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of grouping and the learner as recorded on the log; partitions without a journal are at the start."""

    partitions: Mapping[int, PartitionProgress] = field(default_factory=dict)
    consumed: int = 0
    """Rollouts trained on or skipped."""
    skipped: int = 0
    """Records of journal and steps that could not be read."""
    by_environment: Mapping[str, int] = field(default_factory=dict)
    """Outstanding rollouts by environment."""
    labeling: Mapping[int, LabelingPosition] = field(default_factory=dict)
    """Progress of labeling, by partition; empty where no environment waits for labels."""

    @property
    def outstanding(self) -> int:
        """Rollouts that grouping has read and that are neither dropped, dead-lettered, trained on nor skipped."""
        return sum(p.produced - p.finished_untrained for p in self.partitions.values()) - self.consumed

    @property
    def waiting(self) -> int:
        """Rollouts that are batched and neither trained on nor skipped."""
        return sum(p.batched for p in self.partitions.values()) - self.consumed

    def position(self, partition: int) -> int:
        """Return the next offset of rollouts that grouping reads on a partition."""
        progress = self.partitions.get(partition)
        return progress.position if progress else 0


def may_start(
    config: CapacityConfig, outstanding: int, mine_unseen: int, rollouts: int = 0, overtaking: int = 0
) -> bool:
    """Return whether a worker may start a group of `rollouts` (default: group_size), given S and the worker's m.

    `overtaking` rollouts are expected to be consumed before the group has ended.
    """
    mine = mine_unseen + (rollouts or config.group_size)
    limit = max(config.limit - overtaking, (config.limit + config.needed) // 2)
    share = min(config.share, (limit - config.floor) // config.workers)
    return mine <= share and outstanding + mine + (config.workers - 1) * share <= limit


def largest_group(config: CapacityConfig) -> int:
    """Return the most rollouts that a worker may start together while no others are outstanding."""
    share = min(config.share, (config.limit - config.floor) // config.workers)
    return min(share, config.limit - (config.workers - 1) * share)


def within_quota(config: CapacityConfig, environment: str, outstanding: int, mine_unseen: int, rollouts: int) -> bool:
    """Return whether a group of `rollouts` keeps an environment within its quota, given the environment's S and m."""
    quota = config.quotas.get(environment, 1.0)
    mine = mine_unseen + rollouts
    share = quota * config.share
    return mine <= max(share, rollouts) and outstanding + mine + (config.workers - 1) * share <= quota * config.limit


def check_capacity(config: CapacityConfig) -> None:
    """Raise ConfigurationError, naming the number to change, if the pipeline could stall for ever.

    `fresh` must be at least `needed`, which is the sum of rollouts_per_step, the rollouts that can wait on the
    partitions, and a group for each worker.
    """
    for name in ("rollouts_per_step", "partitions", "batch_rollouts", "group_size", "workers"):
        if getattr(config, name) < 1:
            raise ConfigurationError(f"{name} is {getattr(config, name)}; it must be at least 1")
    needed = config.needed
    for environment, quota in config.quotas.items():
        if not 0 < quota <= 1:
            raise ConfigurationError(f"the quota of environment {environment!r} is {quota:g}; it must be in (0, 1]")
    if config.fresh >= needed:
        return
    lag = -(-needed // config.rollouts_per_step) - 1
    raise ConfigurationError(
        f"max_policy_lag {config.max_policy_lag} lets {config.fresh} rollouts be outstanding, but a step may need "
        f"{needed}: rollouts_per_step {config.rollouts_per_step} + partitions {config.partitions} * (batch_rollouts "
        f"{config.batch_rollouts} - 1 + group_size {config.group_size}) + workers {config.workers} * group_size; raise "
        f"max_policy_lag to {lag}, or lower batch_rollouts or partitions"
    )


class FlowControl:
    """Flow control of one worker. Not thread-safe: only the worker's event loop may call it."""

    def __init__(
        self,
        config: CapacityConfig,
        baseline: Mapping[int, int] | None = None,
        unlabeled: Mapping[int, range] | None = None,
    ) -> None:
        """`baseline` holds the offset after the last record of each partition at start, and `unlabeled` the offsets of
        `unlabelled` that waited then. Unread rollouts before these ends, and at these offsets, may come from an earlier
        process of this worker, so they count as its own."""
        check_capacity(config)
        self.config = config
        self._progress = RunProgress()
        self._baseline = dict(baseline or {})
        self._overtaking: deque[int] = deque(maxlen=_GROUPS_REMEMBERED)
        """Rollouts consumed while each of the newest groups was played."""
        self._overtaking_labels: deque[int] = deque(maxlen=_GROUPS_REMEMBERED)
        """Rollouts consumed while each of the newest labeled rollouts waited for its label."""
        self._reserved: Counter[str] = Counter()
        self._delivered: dict[tuple[str, int], list[int]] = {}
        """Offsets that grouping has not read, by environment and partition."""
        self._unlabeled: dict[tuple[str, int], list[tuple[int, int]]] = {
            ("", partition): [(offset, _UNKNOWN) for offset in offsets]
            for partition, offsets in (unlabeled or {}).items()
        }
        """Offsets in `unlabelled` that wait for a label, each with the rollouts consumed when it was delivered."""

    def share_with(self, workers: int) -> None:
        """Share the capacity among this number of workers from now on. Raises ConfigurationError and changes nothing if
        the pipeline could then stall for ever."""
        config = replace(self.config, workers=workers)
        check_capacity(config)
        self.config = config

    @property
    def outstanding(self) -> int:
        """S, the outstanding rollouts that grouping has read, as last observed."""
        return self._progress.outstanding

    @property
    def records_skipped(self) -> int:
        """Records of journal and steps that could not be read; they may make the counts too low."""
        return self._progress.skipped

    @property
    def mine_unseen(self) -> int:
        """Rollouts that this worker started and that grouping has not read."""
        delivered = sum(map(len, self._delivered.values()))
        earlier = sum(max(0, end - self._progress.position(p)) for p, end in self._baseline.items())
        return self._reserved.total() + self.waiting_for_labels + delivered + earlier

    @property
    def waiting_for_labels(self) -> int:
        """Rollouts of this worker that wait for a label."""
        return sum(map(len, self._unlabeled.values()))

    def _mine_of(self, environment: str) -> int:
        delivered = sum(len(offsets) for (name, _p), offsets in self._delivered.items() if name == environment)
        waiting = sum(len(offsets) for (name, _p), offsets in self._unlabeled.items() if name == environment)
        return self._reserved[environment] + delivered + waiting

    def observe(self, progress: RunProgress) -> None:
        """Update the progress from newer journal records and steps."""
        if progress is self._progress:
            return
        self._progress = progress
        self._note_labels()
        for (_environment, partition), offsets in self._delivered.items():
            position = progress.position(partition)
            while offsets and offsets[0] < position:
                heapq.heappop(offsets)

    def _note_labels(self) -> None:
        """Count labeled rollouts as delivered at the newest record that labeling wrote: once grouping has read that
        record, it has also read each rollout's label or cancellation."""
        waited = []
        for (environment, partition), waiting in self._unlabeled.items():
            labeling = self._progress.labeling.get(partition)
            while labeling and waiting and waiting[0][0] < labeling.position:
                _offset, consumed = heapq.heappop(waiting)
                if consumed != _UNKNOWN:
                    waited.append(self.consumed - consumed)
                if labeling.written > self._progress.position(partition):
                    heapq.heappush(self._delivered.setdefault((environment, partition), []), labeling.written - 1)
        if waited:
            self._overtaking_labels.append(max(waited))

    def start_group(self, environment: str = "", rollouts: int = 0) -> bool:
        """Reserve a group of `rollouts` (default: group_size) of an environment and return True, or return False if
        the limit or the environment's quota leaves no room now."""
        rollouts = rollouts or self.config.group_size
        step_waits = self._progress.waiting >= self.config.rollouts_per_step
        overtaking = max(self._overtaking, default=0) + max(self._overtaking_labels, default=0) if step_waits else 0
        if not may_start(self.config, self._progress.outstanding, self.mine_unseen, rollouts, overtaking):
            return False
        if step_waits and environment in self.config.quotas:
            outstanding = self._progress.by_environment.get(environment, 0)
            if not within_quota(self.config, environment, outstanding, self._mine_of(environment), rollouts):
                return False
        self._reserved[environment] += rollouts
        return True

    @property
    def consumed(self) -> int:
        """Rollouts trained on or skipped, as last observed."""
        return self._progress.consumed

    def note_end(self, consumed_at_start: int) -> None:
        """Note that a group has ended; the rollouts consumed since `consumed_at_start` overtook it."""
        self._overtaking.append(self.consumed - consumed_at_start)

    def note_delivery(self, partition: int, offset: int, environment: str = "") -> None:
        """Note that a rollout of a group reserved for an environment is on the log. At an unknown offset, -1, it counts
        as read by grouping."""
        self._reserved[environment] -= 1
        if offset >= self._progress.position(partition):
            heapq.heappush(self._delivered.setdefault((environment, partition), []), offset)

    def note_unlabeled(self, partition: int, offset: int, environment: str = "") -> None:
        """Note that a rollout of a group reserved for an environment waits for its label, at an offset of
        `unlabelled`."""
        self._reserved[environment] -= 1
        heapq.heappush(self._unlabeled.setdefault((environment, partition), []), (offset, self.consumed))

    def release(self, rollouts: int, environment: str = "") -> None:
        """Release reserved members of an environment's group that will never be sent."""
        self._reserved[environment] -= rollouts
