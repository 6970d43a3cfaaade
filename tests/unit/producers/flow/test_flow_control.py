"""The flow-control rule: never beyond the limit, and never stopped forever, whatever the order of events."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import (
    FlowControl,
    LabelingPosition,
    PartitionProgress,
    RunProgress,
    check_capacity,
    may_start,
    within_quota,
)
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import FateCount
from rollstream.topics.records.journal import JournalCounts
from tests.support.journal_records import journal_record

# resting 2 * (5 - 1 + 4) = 16, limit 6 * 16 - 16 = 80, floor 16 + 16 = 32, share (80 - 32) / 2 = 24
CONFIG = CapacityConfig(max_policy_lag=5, rollouts_per_step=16, partitions=2, batch_rollouts=5, group_size=4, workers=2)


def counts(*, position: int, produced: int, finished: int = 0) -> PartitionProgress:
    return PartitionProgress(position, produced, finished)


def fate(name: str, rollouts: int, environment: str = "dsort3") -> FateCount:
    return FateCount(environment=environment, fate=name, rollouts=rollouts, tokens=0)


@pytest.mark.parametrize(
    ("outstanding", "mine", "allowed"),
    [
        (0, 0, True),
        (0, 20, True),  # 20 + 4 = share
        (0, 21, False),
        (32, 20, True),  # at the floor the whole share is free
        (52, 0, True),  # 52 + 4 + 24 = limit
        (53, 0, False),
        (52, 1, False),
        (-5, 0, True),
    ],
)
def test_a_group_starts_only_within_the_share_and_the_limit(outstanding: int, mine: int, allowed: bool) -> None:
    assert may_start(CONFIG, outstanding, mine) is allowed


def test_the_journal_counts_what_is_finished_untrained() -> None:
    record = journal_record(
        sequence=3,
        begin=10,
        position=40,
        watermark=30,
        batch_number=2,
        counts=(
            fate("batched", 9),
            fate("dropped:zero_variance", 4),
            fate("dropped:late", 1, "add"),
            fate("dead_lettered", 2, ""),
            fate("control", 5, ""),
        ),
        produced=(fate("read", 20), fate("read", 7, "add"), fate("read", 2, "")),
    )
    journal = JournalCounts()
    journal.add(record)
    assert PartitionProgress.of(40, journal) == replace(counts(position=40, produced=29, finished=7), batched=9)


def test_outstanding_is_what_was_read_less_what_is_over() -> None:
    partitions = {0: counts(position=40, produced=30, finished=7), 1: counts(position=9, produced=9)}
    assert RunProgress(partitions, consumed=13).outstanding == 30 - 7 + 9 - 13


def test_my_rollouts_count_from_the_start_of_their_group_until_grouping_read_them() -> None:
    flow = FlowControl(CONFIG)
    assert flow.start_group()
    assert flow.mine_unseen == 4
    flow.release(1)
    for offset in (7, 8, 9):
        flow.note_delivery(1, offset)
    assert flow.mine_unseen == 3
    flow.observe(RunProgress({1: counts(position=9, produced=9)}))
    assert flow.mine_unseen == 1
    flow.observe(RunProgress({1: counts(position=10, produced=10)}))
    assert flow.mine_unseen == 0


def test_a_delivery_that_grouping_read_before_its_report_counts_once() -> None:
    flow = FlowControl(CONFIG)
    flow.start_group()
    flow.observe(RunProgress({0: counts(position=4, produced=4)}))
    for offset in range(4):
        flow.note_delivery(0, offset)
    assert flow.mine_unseen == 0


def test_a_delivery_at_an_unknown_offset_is_not_waited_for() -> None:
    flow = FlowControl(CONFIG)
    flow.start_group()
    for offset in (-1, 7, -1, 8):
        flow.note_delivery(0, offset)
    assert flow.mine_unseen == 2


def test_unread_rollouts_of_an_earlier_incarnation_count_as_mine() -> None:
    flow = FlowControl(CONFIG, baseline={0: 20, 1: 5})
    assert not flow.start_group()
    flow.observe(RunProgress({0: counts(position=12, produced=12), 1: counts(position=5, produced=5)}))
    assert flow.mine_unseen == 8
    assert flow.start_group()


def test_what_waits_for_a_label_is_mine_until_grouping_read_what_became_of_it() -> None:
    flow = FlowControl(CONFIG)
    assert flow.start_group("a")
    for offset in (3, 5, 6, 8):
        flow.note_unlabeled(1, offset, "a")
    assert (flow.mine_unseen, flow.waiting_for_labels) == (4, 4)
    flow.observe(RunProgress(labeling={0: LabelingPosition(9, 9), 1: LabelingPosition(6, 21)}))
    assert (flow.mine_unseen, flow.waiting_for_labels) == (4, 2), "labeled, and not read by grouping"
    grouping = {1: counts(position=21, produced=2)}
    flow.observe(RunProgress(grouping, labeling={1: LabelingPosition(6, 21)}))
    assert (flow.mine_unseen, flow.waiting_for_labels) == (2, 2)
    flow.observe(RunProgress(grouping, labeling={1: LabelingPosition(9, 21)}))
    assert (flow.mine_unseen, flow.waiting_for_labels) == (0, 0), "the labeler wrote nothing for the last two"


def test_what_waited_for_labels_at_the_start_counts_as_mine_until_it_is_labeled() -> None:
    flow = FlowControl(CONFIG, unlabeled={0: range(2, 20), 1: range(7, 12)})
    assert not flow.start_group()
    flow.observe(RunProgress(labeling={0: LabelingPosition(18, 0), 1: LabelingPosition(12, 4)}))
    assert flow.mine_unseen == 2 + 5
    flow.observe(RunProgress({1: counts(position=4, produced=4)}, labeling={0: LabelingPosition(20, 0)}))
    assert flow.mine_unseen == 0


def test_what_the_learner_takes_while_labels_are_awaited_comes_off_the_limit() -> None:
    flow = FlowControl(replace(CONFIG, workers=1))  # limit 80, or 65 after rollouts that 15 overtook
    flow.start_group("a")
    flow.note_unlabeled(0, 0, "a")
    flow.release(3, "a")
    waiting = {0: PartitionProgress(99, 75, 0, 75)}
    flow.observe(RunProgress(waiting, 15, labeling={0: LabelingPosition(1, 1)}))
    assert sum(flow.start_group() for _ in range(9)) == 1


def test_the_share_is_bounded_when_nothing_is_read() -> None:
    flow = FlowControl(CONFIG)
    assert [flow.start_group() for _ in range(8)] == [True] * 6 + [False] * 2


def test_what_the_learner_takes_while_a_group_is_played_comes_off_the_limit_but_half_stays() -> None:
    assert may_start(CONFIG, 45, 0, overtaking=15)  # limit 65, share 16: 45 + 4 + 16
    assert not may_start(CONFIG, 46, 0, overtaking=15)
    assert may_start(CONFIG, 42, 0, overtaking=1000)  # limit 60, share 14
    assert not may_start(CONFIG, 43, 0, overtaking=1000)


def test_long_groups_lower_the_limit_only_while_a_whole_step_waits() -> None:
    flow = FlowControl(replace(CONFIG, workers=1))  # limit 80, or 65 after a group that was overtaken by 15
    for consumed, batched, starts in ((0, 60, 4), (15, 75, 1), (15, 30, 4)):
        flow.observe(RunProgress({0: PartitionProgress(99, 60 + consumed, 0, batched)}, consumed))
        assert sum(flow.start_group() for _ in range(4)) == starts
        flow.release(4 * starts)
        flow.note_end(flow.consumed - 15)


QUOTAS = replace(CONFIG, quotas={"a": 0.5})


def test_a_quota_is_the_same_rule_with_part_of_share_and_limit() -> None:
    # share 12 and limit 40 for a: 24 outstanding, 4 of this group and 12 of the other worker make 40
    assert within_quota(QUOTAS, "a", outstanding=24, mine_unseen=0, rollouts=4)
    assert not within_quota(QUOTAS, "a", outstanding=25, mine_unseen=0, rollouts=4)
    assert not within_quota(QUOTAS, "a", outstanding=0, mine_unseen=9, rollouts=4)
    assert within_quota(QUOTAS, "a", outstanding=0, mine_unseen=0, rollouts=16), "a group at least"
    assert within_quota(QUOTAS, "b", outstanding=52, mine_unseen=0, rollouts=4)


def test_a_quota_holds_while_a_whole_step_waits_and_not_otherwise() -> None:
    flow = FlowControl(QUOTAS)
    waiting = PartitionProgress(position=40, produced=40, finished_untrained=0, batched=16)
    flow.observe(RunProgress({0: waiting}, by_environment={"a": 30, "b": 10}))
    assert not flow.start_group("a")
    assert flow.start_group("b")
    flow.observe(RunProgress({0: waiting}, consumed=1, by_environment={"a": 30, "b": 9}))
    assert flow.start_group("a")


def test_what_an_environment_delivered_or_released_is_no_longer_its_own() -> None:
    flow = FlowControl(QUOTAS)
    waiting = PartitionProgress(position=40, produced=16, finished_untrained=0, batched=16)
    flow.observe(RunProgress({0: waiting}))
    assert [flow.start_group("a") for _ in range(4)] == [True, True, True, False]
    flow.release(4, "a")
    assert flow.start_group("a", 4)
    for offset in range(40, 44):
        flow.note_delivery(0, offset, "a")
    assert not flow.start_group("a")
    flow.observe(RunProgress({0: replace(waiting, position=44, produced=20)}, by_environment={"a": 4}))
    assert flow.start_group("a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_policy_lag": 1}, "raise max_policy_lag to 2"),
        ({"partitions": 12}, "partitions 12"),
        ({"batch_rollouts": 64}, "batch_rollouts"),
        ({"workers": 20}, "workers 20"),
        ({"group_size": 0}, "group_size is 0"),
        ({"quotas": {"a": 0.5, "b": 1.5}}, "environment 'b' is 1.5"),
        ({"quotas": {"a": 0.0}}, "environment 'a' is 0"),
    ],
)
def test_a_pipeline_that_could_come_to_rest_is_refused(change: dict[str, int], message: str) -> None:
    check_capacity(CONFIG)
    with pytest.raises(ConfigurationError, match=message):
        check_capacity(replace(CONFIG, **change))


def test_the_lag_it_names_is_enough_and_the_least() -> None:
    small = replace(CONFIG, max_policy_lag=0)
    with pytest.raises(ConfigurationError) as refused:
        check_capacity(small)
    lag = int(str(refused.value).split("raise max_policy_lag to ")[1].split(",")[0])
    check_capacity(replace(small, max_policy_lag=lag))
    with pytest.raises(ConfigurationError):
        check_capacity(replace(small, max_policy_lag=lag - 1))


class Pipeline:
    """A model of everything around the rule: logs, grouping that reads and seals, a learner that takes whole steps."""

    def __init__(self, config: CapacityConfig, labels: bool = False) -> None:
        """With `labels`, what workers send waits for a label first."""
        self.labels = labels
        self.unlabeled: list[list[int]] = [[] for _ in range(config.partitions)]
        self.labeling = dict.fromkeys(range(config.partitions), LabelingPosition(0, 0))
        self.config = config
        self.flows = [FlowControl(config) for _ in range(config.workers)]
        self.generating: list[list[int]] = [[] for _ in range(config.workers)]  # members still to come, per group
        self.log: list[list[tuple[int, int]]] = [[] for _ in range(config.partitions)]  # group of each record
        self.read = [0] * config.partitions
        self.members: dict[int, int] = {}
        self.consumed_at_start: dict[int, int] = {}
        self.sealed = [0] * config.partitions
        self.batches: list[int] = []
        self.dropped = self.trained = self.started = 0

    def start(self, worker: int) -> bool:
        if not self.flows[worker].start_group():
            return False
        self.started += 1
        self.generating[worker].append(self.started)
        self.consumed_at_start[self.started] = self.flows[worker].consumed
        return True

    def send(self, worker: int) -> None:
        """Send the oldest group of a worker whole."""
        if self.generating[worker]:
            group = self.generating[worker].pop(0)
            self.flows[worker].note_end(self.consumed_at_start[group])
            partition = group % self.config.partitions
            for _ in range(self.config.group_size):
                if self.labels:
                    self.unlabeled[partition].append(group)
                    self.flows[worker].note_unlabeled(partition, len(self.unlabeled[partition]) - 1)
                else:
                    self.log[partition].append((group, worker))
                    self.flows[worker].note_delivery(partition, len(self.log[partition]) - 1)

    def label(self, partition: int, records: int) -> None:
        """Label the next rollouts that wait."""
        position = self.labeling[partition].position
        labeled = self.unlabeled[partition][position : position + records]
        if labeled:
            self.log[partition] += [(group, 0) for group in labeled]
            self.labeling[partition] = LabelingPosition(position + len(labeled), len(self.log[partition]))
            self.publish()

    def group(self, partition: int, records: int, drop: bool) -> None:
        for group, _ in self.log[partition][self.read[partition] : self.read[partition] + records]:
            self.read[partition] += 1
            self.members[group] = self.members.get(group, 0) + 1
            if self.members[group] == self.config.group_size:
                if drop:
                    self.dropped += self.config.group_size
                else:
                    self.sealed[partition] += self.config.group_size
            if self.sealed[partition] >= self.config.batch_rollouts:
                self.batches.append(self.sealed[partition])
                self.sealed[partition] = 0
        self.publish()

    def learn(self) -> None:
        """Make steps of whole batches in order, while there are enough rollouts."""
        while sum(self.batches) >= self.config.rollouts_per_step:
            rows = 0
            while rows < self.config.rollouts_per_step:
                rows += self.batches.pop(0)
            self.trained += rows
        self.publish()

    def publish(self) -> None:
        partitions = {p: counts(position=n, produced=n) for p, n in enumerate(self.read)}
        partitions[0] = replace(partitions[0], finished_untrained=self.dropped)
        for flow in self.flows:
            flow.observe(RunProgress(partitions, self.trained, labeling=self.labeling))

    @property
    def total(self) -> int:
        """Number of rollouts that were started and are neither dropped nor trained on."""
        return self.started * self.config.group_size - self.dropped - self.trained


@st.composite
def configs(draw: st.DrawFn) -> CapacityConfig:
    config = CapacityConfig(
        max_policy_lag=0,
        rollouts_per_step=draw(st.integers(1, 16)),
        partitions=draw(st.integers(1, 2)),
        batch_rollouts=draw(st.integers(1, 8)),
        group_size=draw(st.integers(1, 4)),
        workers=draw(st.integers(1, 3)),
        in_flight=draw(st.sampled_from([0, 0, 4, 16])),
    )
    lag = -(-config.needed // config.rollouts_per_step) - 1
    return replace(config, max_policy_lag=lag + draw(st.integers(0, 3)))


# Most amounts are "all there is": the worst cases fill shares, send everything and read everything.
actions = st.lists(
    st.tuples(
        st.sampled_from(["start", "send", "label", "group", "learn"]),
        st.integers(0, 3),
        st.sampled_from([1, 1000, 1000]),
        st.booleans(),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=100)
@given(configs(), actions, st.booleans())
def test_the_limit_is_never_exceeded(
    config: CapacityConfig, script: list[tuple[str, int, int, bool]], labels: bool
) -> None:
    pipeline = Pipeline(config, labels)
    for action, number, amount, drop in script:
        match action:
            case "start":
                while amount and pipeline.start(number % config.workers):
                    amount -= 1
            case "send":
                for _ in range(min(amount, len(pipeline.generating[number % config.workers]))):
                    pipeline.send(number % config.workers)
            case "label":
                for partition in range(config.partitions) if amount > 1 else [number % config.partitions]:
                    pipeline.label(partition, amount)
            case "group":
                for partition in range(config.partitions) if amount > 1 else [number % config.partitions]:
                    pipeline.group(partition, amount, drop)
            case "learn":
                pipeline.learn()
        assert pipeline.total <= config.limit


@settings(max_examples=50)
@given(configs(), st.sets(st.integers(0, 3)), st.integers(0, 2**32), st.booleans())
def test_workers_that_died_holding_all_they_may_never_stall_the_rest(
    config: CapacityConfig, dead: set[int], seed: int, labels: bool
) -> None:
    pipeline = Pipeline(config, labels)
    dead &= set(range(1, config.workers))
    for worker in dead:
        while pipeline.start(worker):
            pass
    for _ in range(40):
        if pipeline.trained >= 4 * config.rollouts_per_step:
            return
        progressed = False
        for worker in set(range(config.workers)) - dead:
            while pipeline.start(worker):
                progressed = True
            while pipeline.generating[worker]:
                pipeline.send(worker)
        for partition in range(config.partitions):
            pipeline.label(partition, len(pipeline.unlabeled[partition]))
            # A quarter of the groups has no variance.
            seed = seed * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
            pipeline.group(partition, len(pipeline.log[partition]), drop=seed >> 62 == 0)
        before = pipeline.trained
        pipeline.learn()
        assert progressed or pipeline.trained > before, "nothing moves any more"
    assert pipeline.trained > 0
