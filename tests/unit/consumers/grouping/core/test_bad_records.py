"""Records that would end a task for good are refused and recorded, and the task continues."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GENERATION_STEP, GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import VERSION_STEP
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.core.task_journal import JournalPointers
from rollstream.consumers.grouping.testing import GroupingTestDriver, Piped, example_rollout
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Mark, NamedArray, Rollout, SamplingParams
from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import REFERENCE
from tests.support.pairs import driver, pair, reasons, uids


def array(*shape: int, dtype: str = "<f4", size: int = 16) -> NamedArray:
    return NamedArray(dtype=dtype, shape=shape, data=bytes(size))


def carrying(name: str, extra: NamedArray) -> Rollout:
    return example_rollout("bad", token_arrays={name: extra})


def mark_of(config: GroupingConfig, **fields: Any) -> Mark:
    return Mark(kind="configuration", generation=config.generation, configuration=config.to_json(), **fields)


BAD: dict[str, Piped] = {
    "65 dimensions": carrying("x", array(4, *(1,) * 64)),
    "65 dimensions of a reference": carrying(REFERENCE, array(4, *(1,) * 64)),
    "an empty huge dimension": carrying("x", array(4, 2**62, 0, size=0)),
    "an empty huge dimension of a reference": carrying(REFERENCE, array(4, 2**62, 0, size=0)),
    "more dimensions than there is time to multiply": carrying("x", array(4, *(2**62,) * 100_000)),
    "a number not every machine has": carrying("x", array(4, dtype="<f16", size=64)),
    "a long name": carrying("x" * 513, array(4)),
    "many arrays": example_rollout("bad", token_arrays={str(number): array(4) for number in range(257)}),
    "a policy version far ahead": Mark(kind="policy_version", policy_version=2**40),
    "a policy version beside a deadline": Mark(kind="deadline", policy_version=VERSION_STEP + 1),
    "the last generation": mark_of(GroupingConfig(generation=2**63 - 1)),
    "a generation too far": mark_of(GroupingConfig(generation=GENERATION_STEP + 1)),
    "batches no record holds": mark_of(GroupingConfig(generation=1, batch_bytes=2**40)),
    "a number of no type": Mark(
        kind="configuration", generation=1, configuration='{"generation": 1, "seed": 1%s}' % ("0" * 400)
    ),
    "another generation inside": Mark(kind="configuration", generation=1, configuration=GroupingConfig().to_json()),
    "no configuration": Mark(kind="configuration", generation=1, configuration="none"),
}


@pytest.mark.parametrize("record", BAD.values(), ids=BAD.keys())
def test_a_bad_record_is_dropped_as_invalid_and_the_task_goes_on(record: Piped) -> None:
    d = driver()
    before = d.fold.config
    d.pipe(record)
    pair(d, "after")
    d.crash_and_restore()
    pair(d, "later")
    assert d.fold.config == before
    assert d.fold.policy_version == 0
    assert reasons(d) == {0: "invalid"}
    counted = task_state.restored_state(d.journal)
    assert sum(count.rollouts for count in counted.produced) == 5
    assert sum(count.rollouts for count in counted.counts) == 5
    assert uids(d) == [("aftera", "afterb"), ("latera", "laterb")]


def test_a_record_of_another_topic_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = encode(driver().journal[0])
    decoded = []
    monkeypatch.setattr(codec, "decode", lambda value: decoded.append(value) or decode(value))
    d = driver()
    decoded.clear()
    d.pipe(foreign)
    d.pipe(foreign[:-1])
    assert {drop.offset: drop.detail for drop in d.drops} == dict.fromkeys(
        (0, 1), "a JournalRecord does not belong in rollouts"
    )
    assert d.dead_letters == []
    assert foreign not in decoded
    assert foreign[:-1] not in decoded


DECODED = example_rollout("a", float("inf"))
"""A rollout that the fast reader leaves to the decoder, because of its reward."""


@pytest.mark.parametrize(
    ("place", "record"),
    [
        ("topics.wire.validation._array_problems", carrying("x", array(4))),
        ("topics.wire.codec._all_bools", DECODED),
        ("topics.wire.codec._builder", DECODED),
        ("topics.wire.validation._token_problems", DECODED),
        ("consumers.grouping.core.rollout_reader._are_sound", example_rollout("a")),
        ("consumers.grouping.core.drop_rules.partition_of", example_rollout("a")),
        ("consumers.grouping.core.configuration_marks.check_names", mark_of(GroupingConfig(generation=1))),
    ],
)
def test_a_mistake_of_ours_ends_the_task(monkeypatch: pytest.MonkeyPatch, place: str, record: Rollout | Mark) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise NameError("name 'planted' is not defined")

    d = driver()
    task = GroupingTask(d.fold, JournalPointers(0, 0), GrouperConfig(), "test")
    value, key = encode(record), encode_key("env", "0") if isinstance(record, Rollout) else None
    offset = d.fold.position
    monkeypatch.setattr(f"rollstream.{place}", mistaken)
    with pytest.raises(NameError, match="planted") as raised:
        task.apply(InputRecord(offset, 0, key, value))
    monkeypatch.undo()
    assert raised.value.__notes__ == [
        f"offset {offset} of rollouts[0] ends grouping; fix the cause, or if that is not possible, skip the record: "
        f"`rollstream role group skip 0:{offset} --reason ...`"
    ]
    assert (d.drops, d.dead_letters) == ([], [])


def test_the_clock_and_the_generation_rise_by_one_step_at_a_time() -> None:
    d = driver(policy_version=-1)
    for version in (VERSION_STEP, 2 * VERSION_STEP):
        d.publish_policy_version(version)
        assert d.fold.policy_version == version
    for generation in (GENERATION_STEP, 2 * GENERATION_STEP):
        d.configure(GroupingConfig(generation=generation))
        assert d.fold.config.generation == generation
    assert d.drops == []


def test_a_task_writes_no_mark_that_would_be_refused() -> None:
    d = driver(policy_version=-1)
    task = GroupingTask(d.fold, JournalPointers(0, 0), GrouperConfig(), "test")
    versions = []
    while marks := task.due_marks(0, 3 * VERSION_STEP + 1, d.fold.config):
        [mark] = marks
        versions.append(mark.policy_version)
        assert task.due_marks(0, 3 * VERSION_STEP + 1, d.fold.config) == []
        d.pipe(mark)
    assert versions == [VERSION_STEP, 2 * VERSION_STEP, 3 * VERSION_STEP, 3 * VERSION_STEP + 1]
    with pytest.raises(ConfigurationError, match="may rise by at most 4294967296 at once"):
        task.due_marks(0, -1, GroupingConfig(generation=GENERATION_STEP + 1))
    with pytest.raises(ConfigurationError, match="more than a Kafka record can hold"):
        task.due_marks(0, -1, GroupingConfig(generation=1, batch_bytes=2**40))
    with pytest.raises(ConfigurationError, match="a run must begin with at most"):
        driver(generation=GENERATION_STEP + 1)


# ---------------------------------------------------------------------- bounds


def beyond(**fields: Any) -> Rollout:
    return example_rollout("x", **fields)


ABSURD = {
    "temperature 1e-40 is below grouping.min_temperature 0.01": beyond(sampling=SamplingParams(temperature=1e-40)),
    "temperature 1000 is above grouping.max_temperature 100": beyond(sampling=SamplingParams(temperature=1e3)),
    "reward 1e+10 is above grouping.max_reward 1e+09": beyond(reward=1e10),
    "reward -1e+10 is below grouping.min_reward -1e+09": beyond(reward=-1e10),
    "token id 2147483647 is not below grouping.vocabulary_size 16777216": beyond(tokens=np.full(4, 2**31 - 1, "<i4")),
    "1048577 tokens are more than grouping.max_tokens 1048576": beyond(tokens=np.zeros(2**20 + 1, "<i4")),
}


@pytest.mark.parametrize(("detail", "rollout"), ABSURD.items(), ids=ABSURD.keys())
def test_absurd_numbers_are_refused_in_any_environment_and_the_bound_named(detail: str, rollout: Rollout) -> None:
    d = driver()
    d.pipe(rollout)
    assert [(drop.reason, drop.detail) for drop in d.drops] == [("invalid", f"{detail}, in environment env")]


def test_greedy_sampling_and_large_rewards_are_within_the_default_bounds() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1e6, sampling=SamplingParams(temperature=0.0)))
    d.pipe(example_rollout("b", 0.0, sampling=SamplingParams(temperature=0.0)))
    assert uids(d) == [("a", "b")]


def test_an_environment_has_bounds_of_its_own() -> None:
    own = ("math:word:max_reward=1", "math:word:min_reward=-1", "math:word:vocabulary_size=4", "other:max_tokens=3")
    d = driver(max_reward=5.0, bounds=own)
    for uid, changes in {
        "high": {"reward": 1.5},
        "low": {"reward": -1.5},
        "token": {"reward": 1.0},
        "long": {"environment": "other"},
    }.items():
        rollout = example_rollout(uid, **{"environment": "math:word", **changes})
        d.pipe(rollout)
    pair(d, "fine", group_size=2)
    assert [drop.detail.partition(",")[0] for drop in d.drops] == [
        "reward 1.5 is above grouping.max_reward 1",
        "reward -1.5 is below grouping.min_reward -1",
        "token id 4 is not below grouping.vocabulary_size 4",
        "4 tokens are more than grouping.max_tokens 3",
    ]
    assert uids(d) == [("finea", "fineb")]


def test_bounds_come_into_force_with_a_generation() -> None:
    d = GroupingTestDriver(GroupingConfig(batch_rollouts=2))
    pair(d, "before")
    d.configure(replace(d.fold.config, max_reward=0.5))
    d.pipe(example_rollout("high", 1.0))
    d.crash_and_restore()
    assert d.fold.config.max_reward == 0.5
    assert list(reasons(d).values()) == ["invalid"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_reward": float("nan")}, "not a range of finite numbers"),
        ({"min_reward": 1.0, "max_reward": 0.0}, "1 to 0 is not a range"),
        ({"min_temperature": 0.0}, "must be above 0"),
        ({"vocabulary_size": 0}, "at least 1"),
        ({"bounds": ("max_reward=1",)}, "is not a bound; write ENVIRONMENT:KEY=VALUE"),
        ({"bounds": ("env:reward=1",)}, "one of min_reward, max_reward"),
        ({"bounds": ("env:max_reward=much",)}, "gives max_reward 'much', not a number"),
        ({"bounds": ("env:max_tokens=1.5",)}, "not a whole number"),
        ({"bounds": ("env:max_reward=-2e9",)}, "grouping.bounds of env: -1e\\+09 to -2e\\+09 is not a range"),
    ],
)
def test_bounds_that_no_rollout_can_meet_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GroupingConfig(**settings)
