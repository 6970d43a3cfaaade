"""Flow control of a thousand workers and a learner ten times slower, on a simulated clock, without a broker.

Everything around the rule is a model: workers play groups in random times, grouping cuts batches, the learner takes
whole steps in order. The rule and the counts by environment are the shipped ones.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import FlowControl, PartitionProgress, RunProgress
from rollstream.producers.flow.rollout_counts import EnvironmentCounts
from rollstream.topics.records import FateCount, JournalRecord
from rollstream.topics.records.journal import JournalCounts
from tests.support.journal_records import journal_record

GROUP = 8
FAST, SLOW = "fast", "slow"
MAX_BATCH_AGE = 30
"""Ticks that an incomplete batch waits for further groups."""


@dataclass
class Simulation:
    """A run: each tick groups end, workers start others, grouping reads; the learner makes a step when it is due."""

    capacity: CapacityConfig
    durations: dict[str, tuple[int, int]]
    """Ticks that a group takes, by environment."""
    step_every: int
    """Ticks of one step."""
    seed: int = 0
    version: int = 0
    trained: Counter[str] = field(default_factory=Counter)
    stale: Counter[str] = field(default_factory=Counter)
    most_outstanding: int = 0
    most_held: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.flows = [FlowControl(self.capacity) for _ in range(self.capacity.workers)]
        self.playing: dict[int, list[tuple[int, str, int, int]]] = {}
        """By the tick of its end: worker, environment, version and rollouts consumed at the start of each group."""
        self.logs: list[list[tuple[str, int]]] = [[] for _ in range(self.capacity.partitions)]
        self.read = [0] * self.capacity.partitions
        self.cut = [0] * self.capacity.partitions
        self.arrived: list[list[int]] = [[] for _ in range(self.capacity.partitions)]
        self.batches: list[list[tuple[str, int]]] = []
        self.counts = EnvironmentCounts()
        self.started = 0
        for partition in range(self.capacity.partitions):
            self.counts.add(partition, JournalCounts())

    def run(self, ticks: int) -> None:
        for tick in range(ticks):
            self.deliver(tick)
            self.group(tick)
            if tick % self.step_every == self.step_every - 1:
                self.learn()
            self.observe()
            self.start(tick)
            outstanding = self.started - sum(self.trained.values()) - sum(self.stale.values())
            self.most_outstanding = max(self.most_outstanding, outstanding)
            self.most_held = max(self.most_held, sum(flow.mine_unseen for flow in self.flows))

    def start(self, tick: int) -> None:
        order = list(range(self.capacity.workers))
        self.random.shuffle(order)
        for worker in order:
            # A worker with room takes the fast environment as long as it may.
            for environment, (least, most) in self.durations.items():
                while self.flows[worker].start_group(environment):
                    end = tick + self.random.randint(least, most)
                    self.playing.setdefault(end, []).append(
                        (worker, environment, self.version, self.flows[worker].consumed)
                    )
                    self.started += GROUP

    def deliver(self, tick: int) -> None:
        for worker, environment, version, consumed in self.playing.pop(tick, ()):
            self.flows[worker].note_end(consumed)
            partition = self.random.randrange(self.capacity.partitions)
            log = self.logs[partition]
            for _ in range(GROUP):
                log.append((environment, version))
                self.flows[worker].note_delivery(partition, len(log) - 1, environment)

    def group(self, tick: int) -> None:
        """Read everything; cut whole batches, and what has waited for the longest time."""
        for partition, log in enumerate(self.logs):
            self.arrived[partition] += [tick] * (len(log) - self.read[partition])
            self.read[partition] = len(log)
            while (start := self.cut[partition]) < len(log):
                whole = len(log) - start >= self.capacity.batch_rollouts
                if not whole and tick - self.arrived[partition][start] < MAX_BATCH_AGE:
                    break
                self.cut[partition] = min(start + self.capacity.batch_rollouts, len(log))
                self.batches.append(log[start : self.cut[partition]])

    def learn(self) -> None:
        """Make a step of the oldest batches, without what is too stale, if there are enough."""
        if sum(map(len, self.batches)) < self.capacity.rollouts_per_step:
            return
        rows = 0
        while rows < self.capacity.rollouts_per_step and self.batches:
            batch = self.batches.pop(0)
            if self.version - min(version for _environment, version in batch) > self.capacity.max_policy_lag:
                self.stale.update(environment for environment, _version in batch)
                continue
            rows += len(batch)
            self.trained.update(environment for environment, _version in batch)
        self.version += 1

    def observe(self) -> None:
        partitions = {}
        for partition, log in enumerate(self.logs):
            counts = JournalCounts()
            counts.add(self.record(partition))
            self.counts.add(partition, counts)
            partitions[partition] = PartitionProgress(self.read[partition], len(log), 0, self.cut[partition])
        consumed = sum(self.trained.values()) + sum(self.stale.values())
        progress = RunProgress(partitions, consumed, by_environment=self.counts.outstanding(consumed))
        for flow in self.flows:
            flow.observe(progress)

    def record(self, partition: int) -> JournalRecord:
        log = self.logs[partition]
        if not hasattr(self, "sums"):
            self.sums = [(Counter[str](), Counter[str]()) for _ in self.logs]
            self.seen = [(0, 0) for _ in self.logs]
        produced, batched = self.sums[partition]
        read, cut = self.seen[partition]
        produced.update(environment for environment, _version in log[read:])
        batched.update(environment for environment, _version in log[cut : self.cut[partition]])
        self.seen[partition] = len(log), self.cut[partition]
        return journal_record(
            partition=partition,
            sequence=1,
            partitions=len(self.logs),
            position=len(log),
            counts=tuple(FateCount(environment=e, fate="batched", rollouts=n, tokens=0) for e, n in batched.items()),
            produced=tuple(FateCount(environment=e, fate="read", rollouts=n, tokens=0) for e, n in produced.items()),
        )


def capacity_of(workers: int, **changes: object) -> CapacityConfig:
    values = {"max_policy_lag": 10, "rollouts_per_step": 1024, "partitions": 8, "batch_rollouts": 64}
    return CapacityConfig(**{**values, "group_size": GROUP, "workers": workers, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "longest"), [(4, 40), (16, 10)])
def test_by_default_less_than_one_in_a_hundred_is_stale_beside_a_slow_learner(workers: int, longest: int) -> None:
    """Steps take 20 ticks, so some groups are played during two steps; they may be four steps behind."""
    capacity = CapacityConfig(workers=workers, group_size=GROUP, in_flight=32 * GROUP)
    simulation = Simulation(capacity, {FAST: (1, longest)}, step_every=20)
    simulation.run(1000)
    trained, stale = simulation.trained.total(), simulation.stale.total()
    assert simulation.version >= 47, "the learner hardly ever waits"
    assert stale / (trained + stale) < 0.01


def test_a_thousand_workers_never_outrun_a_learner_ten_times_slower() -> None:
    # A thousand workers could play 1,000 * 8 / 5.5 rollouts a tick, a step of 1,024 in 0.7 ticks: the learner takes 7.
    simulation = Simulation(capacity_of(1000), {FAST: (1, 10)}, step_every=7)
    simulation.run(120)
    trained, stale = simulation.trained.total(), simulation.stale.total()
    assert simulation.version >= 15, "the learner never waits"
    assert stale / (trained + stale) < 0.01
    assert simulation.most_outstanding <= simulation.capacity.limit
    assert simulation.most_held <= simulation.capacity.limit - simulation.capacity.floor


def test_without_a_quota_the_fast_environment_owns_the_mixture_and_with_one_it_does_not() -> None:
    durations = {FAST: (1, 2), SLOW: (20, 40)}
    share = {}
    for quotas in ({}, {FAST: 0.5, SLOW: 0.5}):
        simulation = Simulation(capacity_of(50, quotas=quotas, in_flight=8 * GROUP), durations, step_every=12)
        simulation.run(500)
        assert simulation.version >= 38
        assert simulation.stale.total() <= 0.01 * simulation.trained.total()
        share[bool(quotas)] = simulation.trained[FAST] / simulation.trained.total()
    assert share[False] > 0.9
    assert 0.4 < share[True] < 0.7, "while slow groups are played the fast environment feeds the learner"


def test_a_quota_never_stalls_a_run_whose_other_environments_produce_nothing() -> None:
    simulation = Simulation(capacity_of(20, quotas={FAST: 0.05}), {FAST: (1, 2)}, step_every=5)
    simulation.run(200)
    assert simulation.version >= 30
