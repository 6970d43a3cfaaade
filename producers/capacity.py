"""Flow control: producers never run further ahead of the learner than its policy lag allows. No I/O here.

Outstanding rollouts are those produced and neither dropped, dead-lettered, trained on nor skipped. Their number T stays
at most `limit` = (max_policy_lag + 1) * rollouts_per_step though no worker knows what the others are doing:

- A worker sees S, the outstanding rollouts grouping has read (from the journal, `batch-index` and `steps`), and knows
  its own m: those it started, sent or not, that grouping has not read. So T = S + the sum of all m.
- It starts a group of g only while m + g <= share and S + m + g + (n - 1) * share <= limit: the other n - 1 workers are
  taken at their most. So whoever starts leaves T <= limit, and between starts T only falls. (To split what is free now,
  m + g <= (limit - S) / n, would not do: while a slow worker holds its m, the others raise S to the limit without it.)
- share = (limit - floor) / n, where floor is what can rest in the pipeline until more rollouts come. At or below the
  floor each worker may fill its share whatever the others do, so one that died holding its own never stalls the rest;
  above the floor the learner moves by itself.

S is as fresh as the journal: a worker that sees an old S can exceed the limit, by no more than its share.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from producers.config import CapacityConfig
from topics.errors import ConfigurationError
from topics.journal_counts import JournalCounts


@dataclass(frozen=True)
class PartitionCounts:
    """What the journal of a partition says, in rollouts since the start of the run."""

    position: int
    produced: int
    finished_untrained: int
    batched: int = 0

    @classmethod
    def of(cls, position: int, journal: JournalCounts) -> "PartitionCounts":
        """Sums over environments. Dead letters count as produced too, so they are taken off again."""
        counts = journal.counts
        return cls(
            position=position,
            produced=sum(count.rollouts for count in journal.produced),
            finished_untrained=sum(
                count.rollouts for count in counts if count.fate.startswith(("dropped", "dead_lettered"))
            ),
            batched=sum(count.rollouts for count in counts if count.fate == "batched"),
        )


@dataclass(frozen=True)
class Progress:
    """How far grouping and the learner are, as far as the log says; partitions without a journal are at the start."""

    partitions: Mapping[int, PartitionCounts] = field(default_factory=dict)
    consumed: int = 0
    """Rollouts trained on or skipped."""
    skipped: int = 0
    """Records of journal and steps that could not be read."""

    @property
    def outstanding(self) -> int:
        """Rollouts grouping has read that are neither dropped, dead-lettered, trained on nor skipped."""
        return sum(p.produced - p.finished_untrained for p in self.partitions.values()) - self.consumed

    def position(self, partition: int) -> int:
        """Next offset of rollouts that grouping reads on a partition."""
        found = self.partitions.get(partition)
        return found.position if found else 0


def may_start(config: CapacityConfig, outstanding: int, mine_unseen: int) -> bool:
    """Whether a worker may start a group, given S and its own m (see the module)."""
    mine = mine_unseen + config.group_size
    others = (config.workers - 1) * config.share
    return mine <= config.share and outstanding + mine + others <= config.limit


def check_capacity(config: CapacityConfig) -> None:
    """Raise ConfigurationError, naming the number to change, where the pipeline could come to rest for ever.

    Required: limit >= rollouts_per_step + partitions * (batch_rollouts - 1 + group_size) + workers * group_size.
    """
    for name in ("rollouts_per_step", "partitions", "batch_rollouts", "group_size", "workers"):
        if getattr(config, name) < 1:
            raise ConfigurationError(f"{name} is {getattr(config, name)}; it must be at least 1")
    needed = config.floor + config.workers * config.group_size
    if config.limit >= needed:
        return
    lag = -(-needed // config.rollouts_per_step) - 1
    raise ConfigurationError(
        f"max_policy_lag {config.max_policy_lag} lets {config.limit} rollouts be outstanding, but a step may need "
        f"{needed}: rollouts_per_step {config.rollouts_per_step} + partitions {config.partitions} * (batch_rollouts "
        f"{config.batch_rollouts} - 1 + group_size {config.group_size}) + workers {config.workers} * group_size; raise "
        f"max_policy_lag to {lag}, or lower batch_rollouts or partitions"
    )


class FlowControl:
    """One worker's side of the rule. Not thread-safe: the worker's loop calls it."""

    def __init__(self, config: CapacityConfig, baseline: Mapping[int, int] | None = None) -> None:
        """`baseline` holds the end of each partition at start: what lies before it and is unread may be an earlier
        incarnation's, and counts as mine."""
        check_capacity(config)
        self.config = config
        self._progress = Progress()
        self._baseline = dict(baseline or {})
        self._reserved = 0
        self._delivered: dict[int, list[int]] = {}

    @property
    def outstanding(self) -> int:
        """S, as last observed."""
        return self._progress.outstanding

    @property
    def records_skipped(self) -> int:
        """Records of journal and steps that could not be read, so that the rest may say too little."""
        return self._progress.skipped

    @property
    def mine_unseen(self) -> int:
        """Rollouts this worker started and grouping has not read."""
        delivered = sum(map(len, self._delivered.values()))
        earlier = sum(max(0, end - self._progress.position(p)) for p, end in self._baseline.items())
        return self._reserved + delivered + earlier

    def observe(self, progress: Progress) -> None:
        """Take note of newer journal records and steps."""
        if progress is self._progress:
            return
        self._progress = progress
        for partition, offsets in self._delivered.items():
            position = progress.position(partition)
            while offsets and offsets[0] < position:
                heapq.heappop(offsets)

    def start_group(self) -> bool:
        """Reserve a group and return True, or return False when there is no room now."""
        if not may_start(self.config, self._progress.outstanding, self.mine_unseen):
            return False
        self._reserved += self.config.group_size
        return True

    def delivered(self, partition: int, offset: int) -> None:
        """A rollout of a reserved group is on the log."""
        self._reserved -= 1
        if offset >= self._progress.position(partition):
            heapq.heappush(self._delivered.setdefault(partition, []), offset)

    def given_up(self, rollouts: int) -> None:
        """Members of a reserved group that will never be sent."""
        self._reserved -= rollouts
