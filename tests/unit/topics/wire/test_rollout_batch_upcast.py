"""The old form becomes Rollouts: what each inherits, what is refused, and names that depend on the place alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.topics.errors import RecordError
from rollstream.topics.records import (
    NO_FLOATS,
    OldGroup,
    OldMetadata,
    OldRollout,
    Rollout,
    RolloutBatch,
    RolloutMetadata,
    same,
)
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.rollout_batch_upcast import PLACE, batch_of, upcast
from rollstream.topics.wire.validation import NAME_LIMIT, problems
from tests.strategies import rollouts
from tests.support.old_form import old_form

OF_BATCH = OldMetadata(worker_id="host_1", timestamp=100.5, weight_step=7)


def old(reward: float = 1.0, **changes: Any) -> OldRollout:
    values: dict[str, Any] = {
        "env_name": "math",
        "env_example_id": "q1",
        "prompt_tokens": np.array([5, 6], "<i4"),
        "response_tokens": np.array([7, 8, 9], "<i4"),
        "response_logprobs": np.array([-0.5, -1.0, -1.5], "<f4"),
        "token_rewards": np.array([0, 0, 1], "<f4"),
        "episode_reward": reward,
    }
    return OldRollout(**(values | changes))


def batch(*groups: tuple[OldRollout, ...], metadata: tuple[OldMetadata, ...] = (OF_BATCH,)) -> RolloutBatch:
    return RolloutBatch(groups=tuple(OldGroup(rollouts=group) for group in groups), metadata=metadata)


def test_each_rollout_inherits_the_metadata_of_its_batch() -> None:
    actual = upcast(batch((old(1), old(0)), (old(0.5, env_example_id="q2"),)), "file#0")
    assert actual.refused == ()
    assert [r.metadata for r in actual.rollouts] == [
        RolloutMetadata(worker_id="host_1", timestamp=100.5, weight_step=7)
    ] * 3
    assert [(r.uid, r.group_id, r.group_size, r.example_id, r.reward) for r in actual.rollouts] == [
        ("file#0.0.0", "file#0.0", 2, "q1", 1.0),
        ("file#0.0.1", "file#0.0", 2, "q1", 0.0),
        ("file#0.1.0", "file#0.1", 1, "q2", 0.5),
    ]
    assert {r.extra[PLACE] for r in actual.rollouts} == {"file#0"}


def test_without_metadata_the_worker_is_empty_the_time_zero_and_the_step_minus_one() -> None:
    [made] = upcast(batch((old(),), metadata=()), "f").rollouts
    assert made.metadata == RolloutMetadata(worker_id="", timestamp=0.0, weight_step=-1)
    assert (made.policy_version, made.lowest_version, made.highest_version) == (0, 0, 0)


def test_metadata_of_its_own_goes_before_that_of_the_batch() -> None:
    own = OldMetadata(worker_id="other", timestamp=99.0, weight_step=5)
    actual = upcast(batch((old(), old(metadata=(own,)))), "f").rollouts
    assert [r.metadata.weight_step for r in actual] == [7, 5]
    assert [r.policy_version for r in actual] == [5, 5], "one version for the group: the lowest"
    assert [r.lowest_version for r in actual] == [7, 5]


def test_prompt_and_response_become_one_sequence_with_rewards_over_all_of_it() -> None:
    [made] = upcast(batch((old(),)), "f").rollouts
    assert made.tokens.tolist() == [5, 6, 7, 8, 9]
    assert made.loss_mask.tolist() == [False, False, True, True, True]
    assert made.logprobs.tolist() == [0, 0, -0.5, -1.0, -1.5]
    assert made.token_rewards.tolist() == [0, 0, 0, 0, 1]
    assert [made.prompt_tokens.tolist(), made.response_tokens.tolist()] == [[5, 6], [7, 8, 9]]
    [made] = upcast(batch((old(token_rewards=NO_FLOATS),)), "f").rollouts
    assert len(made.token_rewards) == 0


def test_a_group_of_two_environments_is_filed_under_each_of_them_and_can_be_complete() -> None:
    actual = upcast(batch((old(), old(env_name="code"), old())), "f").rollouts
    assert [(r.environment, r.group_size) for r in actual] == [("math", 2), ("code", 1), ("math", 2)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"response_logprobs": np.zeros(2, "<f4")}, "response_logprobs has 2 entries for 3 tokens"),
        ({"token_rewards": np.zeros(4, "<f4")}, "token_rewards has 4 entries for 3 tokens"),
        ({"episode_reward": float("nan")}, "reward is nan"),
        ({"env_name": ""}, "environment has 0 characters"),
        ({"response_logprobs": np.array([0, 0.5, 0], "<f4")}, "above 0"),
    ],
)
def test_a_senseless_rollout_is_named_and_the_others_of_its_group_are_kept(change: dict[str, Any], why: str) -> None:
    actual = upcast(batch((old(), old(**change), old())), "f#3")
    assert [r.uid for r in actual.rollouts] == ["f#3.0.0", "f#3.0.2"]
    assert [r.group_size for r in actual.rollouts] == [2, 2], "the group can be complete without it"
    [(where, _environment, reason, _count)] = actual.refused
    assert where == "f#3, group 0, rollout 1"
    assert why in reason


def test_names_depend_on_the_place_alone_and_have_room_also_for_a_long_one() -> None:
    one, again = (upcast(batch((old(),)), "x" * 2000 + "#1").rollouts[0] for _ in range(2))
    other = upcast(batch((old(),)), "y" + "x" * 1999 + "#1").rollouts[0]
    assert one.uid == again.uid != other.uid
    assert len(one.uid) <= NAME_LIMIT
    assert problems(one) == []


def test_an_old_batch_survives_the_wire() -> None:
    whole = batch((old(), old(metadata=(OF_BATCH,))), (), metadata=())
    read = decode(encode(whole))
    assert same(read, whole)
    assert all(map(same, upcast(read, "f").rollouts, upcast(whole, "f").rollouts))


@settings(max_examples=settings().max_examples // 4)
@given(st.lists(st.lists(rollouts(), min_size=1, max_size=3), max_size=3))
def test_a_rollout_in_the_old_form_reads_the_same(groups: list[list[Rollout]]) -> None:
    metadata = OldMetadata(worker_id="w", timestamp=1.0, weight_step=3)
    back = upcast(decode(encode(old_form(groups, metadata))), "f").rollouts
    written = [r for group in groups for r in group]
    assert len(back) == len(written)
    for new, made in zip(written, back, strict=True):
        assert (made.environment, made.example_id, made.reward) == (new.environment, new.example_id, new.reward)
        assert made.tokens.tobytes() == new.tokens.tobytes()
        assert made.logprobs.tobytes() == new.logprobs.tobytes()
        assert made.token_rewards.tobytes() == new.token_rewards.tobytes()
        assert dataclasses.replace(made.metadata, replica_id=new.metadata.replica_id) == new.metadata


def test_other_writers_schemas_are_understood_by_the_names_of_their_fields() -> None:
    rollout = {
        "env_name": "math",
        "env_example_id": "q1",
        "prompt_tokens": [5, 6],
        "response_tokens": np.array([7, 8, 9], "<i4").tobytes(),
        "response_logprobs": [-0.5, -1.0, -1.5],
        "token_rewards": None,
        "episode_reward": 1,
    }
    metadata = {"worker_id": "w", "timestamp": 3, "weight_step": 2}
    for given_metadata, step in ((metadata, 2), ([metadata], 2), (None, -1), ([], -1)):
        read = batch_of({"groups": [{"rollouts": [rollout]}], "metadata": given_metadata})
        [made] = upcast(read, "f").rollouts
        assert made.tokens.tolist() == [5, 6, 7, 8, 9]
        assert made.metadata.weight_step == step
    [made] = upcast(batch_of({"groups": [{"rollouts": [{**rollout, "metadata": metadata}]}]}), "f").rollouts
    assert made.metadata.worker_id == "w"


@pytest.mark.parametrize(
    "values",
    [
        {},
        None,
        [],
        {"groups": None},
        {"groups": [{}]},
        {"groups": [{"rollouts": [{"env_name": "e"}]}]},
        {"groups": [], "metadata": {"worker_id": "w"}},
        {"groups": [], "metadata": "no"},
    ],
)
def test_values_that_are_no_old_batch_are_a_record_error(values: Any) -> None:
    with pytest.raises(RecordError, match="not a RolloutBatch"):
        batch_of(values)


@pytest.mark.parametrize("tokens", [[2**31], [0.5], [float("nan")], ["a"], b"abc"])
def test_tokens_that_are_no_32_bit_integers_are_not_rounded(tokens: Any) -> None:
    values = dict(old().__dict__) | {"prompt_tokens": tokens, "metadata": None}
    with pytest.raises(RecordError):
        batch_of({"groups": [{"rollouts": [values]}]})
