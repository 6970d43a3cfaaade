"""The reservoir: what it draws and keeps, and logs that show known defects of such makers."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.core.task_journal import JournalPointers
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker, MakerContext, SealedGroup
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker, draws
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.rl_examples import RLExample, Source
from tests.support.live_objects import live
from tests.support.pairs import pair, reasons, uids
from tests.support.processor_time import ProcessorTime


def driver(maker: type[BatchMaker] = ReservoirBatchMaker, policy_version: int = 0, **config: Any) -> GroupingTestDriver:
    settings = GroupingConfig(**{"maker": "mine", "batch_rollouts": 100, **config})
    return GroupingTestDriver(settings, makers={"mine": maker}, policy_version=policy_version)


def group(d: GroupingTestDriver, rewards: Sequence[float], example_id: str = "0", **fields: Any) -> None:
    for i, reward in enumerate(rewards):
        d.pipe(example_rollout(f"{example_id}-{i}", reward, example_id=example_id, group_size=len(rewards), **fields))


def delivered(d: GroupingTestDriver) -> list[str]:
    return sorted(uid for batch in d.batches for uid in batch.uids)


# ---------------------------------------------------------------------- draws


def test_it_waits_for_enough_and_then_draws_and_takes_them_out() -> None:
    d = driver(batch_rollouts=5)
    for example_id in "01":
        pair(d, example_id)
    assert d.batches == []
    pair(d, "2")
    (batch,) = d.batches
    assert len(batch) == 5
    d.drain()
    assert [len(batch) for batch in d.batches] == [5, 1]
    assert delivered(d) == ["0a", "0b", "1a", "1b", "2a", "2b"]


def test_the_draw_depends_on_seed_partition_and_batch_number_only() -> None:
    def order(seed: int) -> list[tuple[str, ...]]:
        d = driver(batch_rollouts=4, seed=seed)
        for i in range(20):
            pair(d, str(i))
        return uids(d)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != [(f"{i}a", f"{i}b", f"{i + 1}a", f"{i + 1}b") for i in range(0, 20, 2)]


def test_the_numbers_drawn_are_the_same_on_every_platform() -> None:
    assert draws(0, 0, 0, 3) == (7131624670889383012, 15956622227159040767, 17119405090708063022)
    assert len({*draws(0, 0, 0, 3), *draws(1, 0, 0, 3), *draws(0, 1, 0, 3), *draws(0, 0, 1, 3)}) == 12


def test_every_held_rollout_is_equally_likely_to_be_drawn() -> None:
    counts = np.zeros(8)
    for number in range(4_000):
        left = list(range(8))
        for draw in draws(3, 0, number, 4):
            counts[left.pop(draw % len(left))] += 1
    assert np.abs(counts / 4_000 - 0.5).max() < 0.03


def test_members_without_an_advantage_leave_with_a_reason_and_the_others_stay() -> None:
    d = driver()
    group(d, [0.0, 1.0, 0.5])
    d.drain()
    assert delivered(d) == ["0-0", "0-1"]
    assert reasons(d) == {2: "zero_advantage"}


def test_the_metadata_of_a_batch_describe_its_advantages() -> None:
    d = driver()
    group(d, [1.0, 0.0, 0.0, 0.0])
    d.drain()
    (batch,) = d.batches
    metadata = json.loads(batch.metadata)
    stats = metadata.pop("advantage_stats")
    assert metadata == {"maker": "reservoir", "batch_size": 4}
    assert stats == pytest.approx({"mean": 0.0, "std": 3**-0.5, "max": 1.0, "min": -1 / 3}, abs=1e-7)


def test_a_batch_never_exceeds_batch_bytes_and_no_rollout_is_passed_over_to_fill_it() -> None:
    d = driver(batch_rollouts=20, batch_bytes=2_000)
    for i in range(40):
        pair(d, str(i), tokens=np.arange(random.Random(i).randint(5, 40), dtype="<i4"))
    d.drain()
    assert len(delivered(d)) == 80
    assert len(d.batches) > 10
    assert max(len(encode(batch)) for batch in d.batches) <= 2_000 + 512


def test_a_batch_is_drawn_when_enough_bytes_are_waiting_so_memory_has_a_limit() -> None:
    d = driver(batch_rollouts=1_000, batch_bytes=2_000)
    for i in range(40):
        pair(d, str(i), tokens=np.arange(20, dtype="<i4"))
        assert d.fold.in_flight <= 8
    assert {batch.cut for batch in d.batches} == {"size"}


def seconds_for(held: int, count: int = 400) -> float:
    """Return the processor time to add and draw `count` rollouts while `held` more are waiting."""
    maker = ReservoirBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=10**9))
    ones, mask = np.ones(4, "<f4"), np.ones(4, "|b1")

    def add(offset: int) -> None:
        source = Source(0, offset, str(offset))
        example = RLExample(
            tokens=np.arange(4, dtype="<i4"),
            loss_mask=mask,
            advantage=ones,
            generator_log_probs=ones,
            segment_ids=np.ones(4, "<i4"),
            source=source,
        )
        sealed = SealedGroup(
            environment="env",
            example_id=str(offset),
            policy_version=0,
            group_id="",
            rewards=(1.0,),
            advantages=(1.0,),
            sealed_ms=0,
        )
        maker.add_rollout(example, sealed)

    for offset in range(held):
        add(offset)
    best = float("inf")
    for attempt in range(3):
        with ProcessorTime() as spent:
            for i in range(count):
                add(held + attempt * count + i)
            for number in range(count // 20):
                maker.batch_number = number
                drawn = maker.create_batch(20) or []
                assert len(drawn) == 20
        best = min(best, spent.seconds)
    return best


@pytest.mark.long
def test_a_rollout_costs_the_same_with_a_hundred_times_as_many_held() -> None:
    few, many = seconds_for(200), seconds_for(20_000)
    assert many < 3 * few


# ---------------------------------------------------------------------- known defects of such makers


def test_a_deadline_mark_seals_a_group_if_no_other_record_comes() -> None:
    d = driver(min_group_size=2, group_deadline_s=30.0)
    for i in range(2):
        d.pipe(example_rollout(str(i), float(i), group_size=8))
    task = GroupingTask(d.fold, JournalPointers(0, 0), GrouperConfig(), "test")
    task.reach_end(d.fold.position)
    assert task.due_marks(29_999, 0, d.fold.config) == []
    [mark] = task.due_marks(30_000, 0, d.fold.config)
    assert mark.kind == "deadline"
    d.pipe(mark, at_ms=30_000)
    assert d.fold.open_groups == 0
    d.drain()
    assert delivered(d) == ["0", "1"]


def test_delivered_and_dropped_rollouts_leave_nothing_in_memory() -> None:
    before = live(RLExample, Rollout)
    maker = ReservoirBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=10**6))
    d = GroupingTestDriver(
        GroupingConfig(maker="mine", batch_rollouts=4), makers={"mine": lambda _context: maker}, policy_version=1
    )
    for i in range(50):
        pair(d, str(i % 3), policy_version=i % 2, group_id=str(i))
    d.drain()
    d.commit()
    assert maker.held == 0
    assert len(live(RLExample, Rollout)) == len(before)


def test_the_newest_version_of_an_example_is_kept_and_versions_are_numbers() -> None:
    d = driver(policy_version=10)
    for version in (9, 10, 8):
        pair(d, policy_version=version)
    d.drain()
    assert [group.policy_version for batch in d.batches for group in batch.groups] == [10]
    assert reasons(d) == dict.fromkeys((0, 1, 4, 5), "superseded_version")


def test_a_reservoir_put_in_force_later_drops_groups_superseded_before() -> None:
    d = GroupingTestDriver(GroupingConfig(batch_rollouts=100), policy_version=2)
    pair(d, policy_version=1)
    pair(d, policy_version=2)
    assert d.drops == []
    d.configure(GroupingConfig(batch_rollouts=100, maker="reservoir"))
    assert reasons(d) == {0: "superseded_version", 1: "superseded_version"}
