"""Promises of the fold to batch makers, and its checks on makers, including a maker that splits groups."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.consumers.grouping.makers.batch_maker import (
    BatchMaker,
    FifoBatchMaker,
    MakerContext,
    SealedGroup,
    example_bytes,
)
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import StateRefused
from rollstream.topics.records.journal import from_ranges
from rollstream.topics.wire.rl_examples import RLExample, Source
from tests.support.live_objects import live
from tests.support.pairs import pair, reasons, uids
from tests.support.processor_time import ProcessorTime


def driver_of(maker: type[BatchMaker], **config: Any) -> GroupingTestDriver:
    return GroupingTestDriver(
        GroupingConfig(**{"maker": "mine", "batch_rollouts": 2, **config}), makers={"mine": maker}
    )


class Recorder(FifoBatchMaker):
    """Records its calls."""

    calls: list[Any]

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self.calls = []
        Recorder.last = self

    last: "Recorder"

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        self.calls.append((example.source.uid, float(example.advantage[0]), group))
        super().add_rollout(example, group)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        self.calls.append(batch_size)
        return super().create_batch(batch_size)


def test_a_maker_is_given_the_members_of_a_group_in_a_row_when_it_seals() -> None:
    d = driver_of(Recorder, batch_rollouts=3)
    d.pipe(example_rollout("a", 1.0))
    d.pipe(example_rollout("x", 1.0, example_id="1"))
    d.pipe(example_rollout("b", 0.0), at_ms=7)
    group = SealedGroup(
        environment="env",
        example_id="0",
        policy_version=0,
        group_id="",
        rewards=(1.0, 0.0),
        advantages=(1.0, -1.0),
        sealed_ms=7,
    )
    assert Recorder.last.calls == [("a", 1.0, group), ("b", -1.0, group), 3]


def test_a_maker_has_the_partition_the_seed_and_the_number_of_the_next_batch() -> None:
    d = driver_of(Recorder, seed=5, batch_bytes=10_000)
    assert Recorder.last.context == MakerContext(partition=0, seed=5, batch_bytes=10_000)
    pair(d, "0")
    assert Recorder.last.batch_number == 1
    d.commit()
    d.crash_and_restore()
    assert Recorder.last.batch_number == 1
    pair(d, "1")
    assert [batch.number for batch in d.batches] == [0, 1]


def test_sft_batches_have_the_best_of_each_group_and_the_rest_is_dropped_by_name() -> None:
    d = GroupingTestDriver(GroupingConfig(maker="sft", estimator="best", batch_rollouts=3))
    rewards = {"mixed": (0.0, 1.0, 1.0), "right": (0.5, 0.5, 0.5), "wrong": (0.0, 0.0, 0.0), "late": (1.0, 0.0, 3.0)}
    for example, group in rewards.items():
        for member, reward in enumerate(group):
            d.pipe(example_rollout(f"{example}{member}", reward, example_id=example, group_size=3))
    [batch] = d.batches
    assert batch.uids == ("mixed1", "right0", "late2")
    assert set(batch.advantages.tolist()) == {1.0}
    assert set(reasons(d).values()) == {"zero_advantage"}
    assert len(reasons(d)) == 9


def test_pairs_are_the_best_and_the_worst_of_each_group_also_after_a_crash() -> None:
    d = GroupingTestDriver(GroupingConfig(maker="pairs", estimator="best_worst", batch_rollouts=4))
    rewards = {"ties": (0.0, 1.0, 1.0, 0.0), "equal": (0.5, 0.5), "low": (-2.0, -3.0, -2.5)}
    for example, group in rewards.items():
        for member, reward in enumerate(group):
            d.pipe(example_rollout(f"{example}{member}", reward, example_id=example, group_size=len(group)))
            d.commit()
            d.crash_and_restore()
    [batch] = d.batches
    assert batch.uids == ("ties0", "ties1", "low0", "low1")
    assert [batch.advantages[split] for split in batch.splits[:-1]] == [-1.0, 1.0, 1.0, -1.0]
    assert batch.metadata == '{"batch_size": 4, "maker": "pairs"}'
    assert sorted(reasons(d).values()) == ["zero_advantage"] * 3 + ["zero_variance"] * 2


def test_a_group_without_exactly_one_chosen_and_one_rejected_rollout_makes_no_pair() -> None:
    d = GroupingTestDriver(GroupingConfig(maker="pairs", estimator="rloo", batch_rollouts=2))
    for example, group in {"three": (0.0, 1.0, 1.0), "two": (0.0, 1.0)}.items():
        for member, reward in enumerate(group):
            d.pipe(example_rollout(f"{example}{member}", reward, example_id=example, group_size=len(group)))
    assert [batch.uids for batch in d.batches] == [("two0", "two1")]
    assert set(reasons(d).values()) == {"no_pair"}
    assert len(reasons(d)) == 3


class Wrong(FifoBatchMaker):
    """Base of makers that do one thing wrong."""

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self.thrown: list[tuple[Source, str]] = []

    def take_discarded(self) -> list[tuple[Source, str]]:
        taken, self.thrown = self.thrown, []
        return taken


class Loses(Wrong):
    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        if example.source.uid != "0a":
            super().add_rollout(example, group)


class Repeats(Wrong):
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        batch = super().create_batch(batch_size)
        return batch and [*batch, batch[0]]


class MakesNothing(Wrong):
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        return []


class MakesTooMuch(Wrong):
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        self.context = MakerContext(partition=0, seed=0, batch_bytes=10**9)
        return super().create_batch(batch_size)


class ThrowsAwayWhatItKeeps(Wrong):
    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        super().add_rollout(example, group)
        self.thrown.append((example.source, "why not"))


class Renames(Wrong):
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        batch = super().create_batch(batch_size)
        return batch and [replace(e, source=e.source._replace(uid="other")) for e in batch]


class Rewrites(Wrong):
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        batch = super().create_batch(batch_size)
        return batch and [replace(e, tokens=e.tokens + 1) for e in batch]


class TalksTooMuch(Wrong):
    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"uids": [e.source.uid for e in batch] * 1_000}


class TalksNonsense(Wrong):
    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"examples": batch}


class GivesNoReason(Loses):
    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        self.thrown.append((example.source, ""))


class CallsItBatched(Loses):
    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        self.thrown.append((example.source, "batched"))


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (Renames, "with other content than it was given"),
        (Rewrites, "with other content than it was given"),
        (TalksTooMuch, "characters of metadata"),
        (TalksNonsense, "metadata that is not JSON"),
    ],
)
def test_a_maker_that_changes_rollouts_or_returns_bad_metadata_stops_the_task(
    maker: type[BatchMaker], words: str
) -> None:
    with pytest.raises(StateRefused, match=words):
        pair(driver_of(maker))


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (Loses, "holds 1 rollouts, but 2 were"),
        (Repeats, "delivered Source"),
        (MakesNothing, "made an empty batch"),
        (ThrowsAwayWhatItKeeps, "holds 2 rollouts, but 0 were"),
        (GivesNoReason, "discarded Source"),
        (CallsItBatched, r"no valid reason \('batched'\)"),
    ],
)
def test_a_maker_that_loses_repeats_or_invents_rollouts_stops_the_task(maker: type[BatchMaker], words: str) -> None:
    d = driver_of(maker, batch_rollouts=2 if maker is Repeats else 3)
    with pytest.raises(StateRefused, match=words):
        pair(d)


class Picky(Wrong):
    """Discards the second member of every group, and fails if it is told to forget a rollout that it does not hold."""

    def discard(self, sources: Iterable[Source]) -> None:
        held = self.held
        super().discard(sources := list(sources))
        assert self.held == held - len(sources)

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        if example.source.uid.endswith("b"):
            self.thrown.append((example.source, "not mine"))
        else:
            super().add_rollout(example, group)


def test_a_discarded_rollout_is_dropped_with_the_makers_reason_when_its_group_finishes() -> None:
    d = driver_of(Picky)
    pair(d, "0")
    assert d.drops == []
    pair(d, "1")
    assert uids(d) == [("0a", "1a")]
    assert reasons(d) == {1: "not mine", 3: "not mine"}


def test_delivered_members_of_an_unfinished_group_are_not_offered_again_after_a_crash() -> None:
    d = driver_of(ReservoirBatchMaker, batch_rollouts=3)
    pair(d, "0")
    pair(d, "1")
    record = d.commit(snapshot=True)
    (half,) = from_ranges(record.delivered)
    assert half in d.batches[0].source_offsets
    d.crash_and_restore()
    d.drain()
    assert sorted(offset for batch in d.batches for offset in batch.source_offsets.tolist()) == [0, 1, 2, 3]
    assert [len(batch) for batch in d.batches] == [3, 1]


def test_no_rollout_is_kept_in_memory_once_its_group_finished() -> None:
    before = live(HeldRollout)
    d = GroupingTestDriver(GroupingConfig(batch_rollouts=2, group_deadline_s=1e6))
    d.pipe(example_rollout("half", 1.0, example_id="half"))
    assert len(live(HeldRollout)) == len(before) + 1, "an open group is kept"
    for i in range(150):
        pair(d, str(i), tokens=np.arange(10, dtype="<i4"))
    assert len(live(HeldRollout)) == len(before) + 1


class Fickle(Wrong):
    """Discards the rollouts that it holds when it is asked for a batch."""

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        batch = super().create_batch(batch_size)
        if batch and batch[0].source.uid == "0a":
            self.thrown += [(example.source, "on second thoughts") for example in batch]
            return self.create_batch(batch_size)
        return batch


def test_a_maker_may_discard_rollouts_when_asked_for_a_batch() -> None:
    d = driver_of(Fickle, batch_rollouts=1)
    pair(d, "0")
    pair(d, "1")
    assert reasons(d) == {0: "on second thoughts", 1: "on second thoughts"}
    assert uids(d) == [("1a", "1b")]


class Nothing(BatchMaker):
    """Discards every rollout."""

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self._gone: list[tuple[Source, str]] = []

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        self._gone.append((example.source, "no use"))

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        return None

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {}

    def discard(self, sources: Iterable[Source]) -> None:
        raise AssertionError("nothing is held")

    @property
    def held(self) -> int:
        return 0

    def take_discarded(self) -> list[tuple[Source, str]]:
        taken, self._gone = self._gone, []
        return taken


def test_a_group_discarded_whole_finishes_at_once() -> None:
    d = driver_of(Nothing)
    pair(d)
    assert reasons(d) == {0: "no use", 1: "no use"}
    assert d.fold.in_flight == 0
    assert d.fold.held_bytes == 0


def test_a_batch_beyond_batch_bytes_stops_the_task() -> None:
    d = driver_of(MakesTooMuch, batch_rollouts=100, batch_bytes=500)
    pair(d, "0")
    pair(d, "1")
    with pytest.raises(StateRefused, match=r"made a batch of 672 bytes, but grouping\.batch_bytes is 500"):
        d.drain()


def seconds_to_drop(groups: int) -> float:
    """Return the processor time per group to drop that many waiting groups as stale."""
    d = GroupingTestDriver(GroupingConfig(batch_rollouts=10**6, batch_bytes=10**9, max_policy_lag=0))
    for i in range(groups):
        pair(d, str(i))
    d.commit()
    with ProcessorTime() as spent:
        d.publish_policy_version(1)
    assert len(d.drops) == 2 * groups
    return spent.seconds / groups


@pytest.mark.long
def test_a_group_dropped_while_it_waits_costs_the_same_among_many() -> None:
    few, many = (min(seconds_to_drop(groups) for _ in range(2)) for groups in (100, 1_000))
    assert many < 4 * few


@pytest.mark.parametrize(("spare_bytes", "groups"), [(0, 2), (-1, 1)])
def test_a_batch_may_have_as_many_bytes_as_the_limit_and_not_one_more(spare_bytes: int, groups: int) -> None:
    d = driver_of(Recorder, batch_rollouts=100)
    for number, member in itertools.product(range(3), range(2)):
        d.pipe(example_rollout(f"{number}-{member}", float(member), example_id=str(number)))
    sealed = [call[2] for call in Recorder.last.calls if isinstance(call, tuple)]
    examples = Recorder.last.create_batch(6)
    assert examples is not None
    size_bytes = sum(map(example_bytes, examples[:4])) + sum(group.name_bytes for group in sealed[:4:2])
    maker = FifoBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=size_bytes + spare_bytes))
    for example, group in zip(examples, sealed, strict=True):
        maker.add_rollout(example, group)
    assert maker.create_batch(100) == examples[: 2 * groups]
