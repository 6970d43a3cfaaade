"""Estimators by environment, and what an estimator that asks for details sees; both survive crashes bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.estimators import Estimator, Outcomes, TurnOutcome
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Rollout, TrainingBatch, Turn
from rollstream.topics.wire.codec import encode

SUMS = "mine.py:sums"


def advantages(*batches: TrainingBatch) -> dict[str, float]:
    """The advantage of each rollout by uid."""
    return {uid: float(batch.advantages[batch.splits[row]]) for batch in batches for row, uid in enumerate(batch.uids)}


def pair(environment: str, *rewards: float, **fields: object) -> list[Rollout]:
    return [
        example_rollout(f"{environment}{n}", reward, environment=environment, group_size=len(rewards), **fields)  # type: ignore[arg-type]
        for n, reward in enumerate(rewards)
    ]


def test_each_environment_has_its_own_estimator_and_all_others_have_the_runs() -> None:
    config = GroupingConfig(batch_rollouts=6, estimators=("a=dr_grpo", "b=reinforce_pp"))
    driver = GroupingTestDriver(config)
    for rollout in (*pair("a", 1.0, 0.0), *pair("b", 4.0, 0.0), *pair("c", 1.0, 0.0)):
        driver.pipe(rollout)
    # dr_grpo, then dr_grpo made a mean of 0 and a variance of 1 over the rows of b alone, then rloo.
    assert advantages(*driver.batches) == {"a0": 0.5, "a1": -0.5, "b0": 1.0, "b1": -1.0, "c0": 1.0, "c1": -1.0}


def test_a_configuration_without_them_has_the_text_that_it_had_before() -> None:
    assert "estimators" not in json.loads(GroupingConfig().to_json())
    config = GroupingConfig(estimators=("a=grpo",))
    assert GroupingConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["grpo", "=grpo", "a=", ""])
def test_a_text_that_names_no_environment_or_no_estimator_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="names no environment and its estimator"):
        GroupingConfig(estimators=(text,))


def test_an_estimator_that_does_not_exist_is_refused_before_a_record_is_read_and_in_a_mark() -> None:
    with pytest.raises(ConfigurationError, match="estimator is 'grop'"):
        GroupingTestDriver(GroupingConfig(estimators=("a=grop",)))
    driver = GroupingTestDriver(GroupingConfig())
    driver.configure(GroupingConfig(estimators=("a=grop",)))
    assert driver.fold.config.estimators == ()
    with pytest.raises(StateRefused, match=r"grouping.estimator 'mine.py:sums', which this process does not know"):
        driver.configure(GroupingConfig(estimators=(f"a={SUMS}",)))


seen: list[Outcomes] = []


def sums(outcomes: Outcomes) -> list[float]:
    """The sum of the components and of the turns' rewards, of episodes that were not cut off."""
    seen.append(outcomes)
    return [
        sum(0.0 if branch.truncated else sum(branch.components.values()) + sum(turn.reward for turn in branch.turns)
            for branch in branches)
        for branches in outcomes.details
    ]  # fmt: skip


TURNS = (Turn(role="user", text="go", stop=2), Turn(role="assistant", text="on", start=2, stop=4, reward=0.25))
MEMBERS = (
    example_rollout("a0", 1.0, group_size=3, reward_components={"format": 0.5, "exact": 1.0}, turns=TURNS),
    example_rollout("a1", 0.0, group_size=3, reward_components={"exact": 2.0}, truncated=True),
    example_rollout("a2", 0.5, group_size=3, tokens=np.arange(6, dtype="<i4")),
)


@pytest.mark.parametrize("crashes", [False, True])
def test_an_estimator_sees_components_turns_and_truncation_if_it_asks_for_them(crashes: bool) -> None:
    seen.clear()
    config = GroupingConfig(batch_rollouts=3, estimators=(f"env={SUMS}",))
    driver = GroupingTestDriver(config, estimators={SUMS: Estimator(sums, details=True)})
    for rollout in MEMBERS:
        driver.pipe(rollout)
        if crashes:
            driver.commit()
            driver.crash_and_restore()
    assert advantages(*driver.batches) == {"a0": 1.75, "a1": 0.0, "a2": 0.0}
    [[first], [second], [third]] = seen[0].details
    assert first.components == {"format": 0.5, "exact": 1.0}
    assert first.turns == (TurnOutcome("user", 0, 2, 0.0), TurnOutcome("assistant", 2, 4, 0.25))
    assert (second.truncated, third) == (True, ({}, False, ()))


def test_an_estimator_that_does_not_ask_sees_no_details_whatever_others_ask_for() -> None:
    seen.clear()
    config = GroupingConfig(batch_rollouts=3, estimator=SUMS)
    others = {
        SUMS: Estimator(lambda outcomes: [float(not outcomes.details)] * 3),
        "o.py:o": Estimator(sums, details=True),
    }
    driver = GroupingTestDriver(config, estimators=others)
    for rollout in MEMBERS:
        driver.pipe(rollout)
    assert advantages(*driver.batches) == {"a0": 1.0, "a1": 1.0, "a2": 1.0}
    assert seen == []


def test_a_group_that_was_open_when_the_estimator_was_put_in_force_has_all_its_details() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=3), estimators={SUMS: Estimator(sums, details=True)})
    driver.pipe(MEMBERS[0])
    driver.configure(GroupingConfig(batch_rollouts=3, estimator=SUMS))
    driver.commit()
    driver.crash_and_restore()
    for rollout in MEMBERS[1:]:
        driver.pipe(rollout)
    assert advantages(*driver.batches) == {"a0": 1.75, "a1": 0.0, "a2": 0.0}


def test_details_count_as_memory_where_they_are_asked_for_and_only_there() -> None:
    def held(estimator: str, rollout: Rollout) -> int:
        config = GroupingConfig(estimators=(f"env={estimator}",))
        driver = GroupingTestDriver(config, estimators={SUMS: Estimator(sums, details=True)})
        driver.pipe(rollout)
        return driver.fold.held_bytes

    rich, plain = MEMBERS[0], replace(MEMBERS[0], reward_components={}, turns=())
    assert held("grpo", rich) == held("grpo", plain)
    texts = len("format" + "exact" + "user" + "assistant")
    assert held(SUMS, rich) - held("grpo", rich) == 500 + 4 * 300 + texts
    assert held(SUMS, plain) - held("grpo", plain) == 500


def test_the_batches_of_a_log_are_the_same_whether_a_process_knows_an_unused_estimator_or_not() -> None:
    batches = []
    for estimators in ({}, {SUMS: Estimator(sums, details=True)}):
        driver = GroupingTestDriver(GroupingConfig(batch_rollouts=3), estimators=estimators)
        for rollout in MEMBERS:
            driver.pipe(rollout)
        batches.append([encode(batch) for batch in driver.batches])
    assert batches[0] == batches[1] != []
