"""Episodes become rollouts token by token as they were sampled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.producers.environments.environment import Episode, Message, Prompt, Score
from rollstream.producers.inference.client import Completion
from rollstream.producers.inference.replay_arrays import mask_of
from rollstream.producers.inference.requests import Filters
from rollstream.producers.worker.rollout_assembly import GroupStamp, rollout_of, uids_of
from rollstream.topics.errors import RecordError
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS, SAMPLING_MASK, SAMPLING_MASK_COUNTS, WEIGHT_VERSION
from rollstream.topics.wire.validation import is_masked, problems

STAMP = GroupStamp(
    environment="talk",
    group_id="w.1.0",
    group_size=2,
    policy_version=3,
    temperature=0.7,
    logprobs_mode="processed",
    worker_id="w",
    origin={"host": "h", "process": "7"},
)


def reply(
    prompt: Sequence[int],
    tokens: Sequence[int],
    version: int = 3,
    text: str = "hm",
    experts: NDArray[Any] | None = None,
) -> Completion:
    return Completion(
        experts=experts,
        text=text,
        truncated=False,
        prompt_tokens=np.asarray(prompt, np.int32),
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray([-0.5] * len(tokens), np.float32),
        versions=np.full(len(tokens), version, np.int64),
        weight_step=10 * version,
        replica_id="infer-1",
        sampling_params={"temperature": "0.7"},
        timestamp=5.0,
        inference_time_s=0.25,
    )


def episode(*turns: Message | Completion, truncated: bool = False) -> Episode:
    return Episode(turns=turns, score=Score(reward=0.5, components={"exact": 0.0}), truncated=truncated)


def user(text: str) -> Message:
    return Message(role="user", text=text)


def test_a_single_turn_is_its_prompt_masked_and_its_response_trained() -> None:
    played = episode(user("q"), reply([5, 6], [7, 8, 1], text="a"), truncated=True)
    rollout = rollout_of(played, Prompt(example_id="e", text="q"), STAMP, uid="w.1.0.0")
    assert problems(rollout) == []
    assert rollout.tokens.tolist() == [5, 6, 7, 8, 1]
    assert rollout.loss_mask.tolist() == [False, False, True, True, True]
    assert rollout.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert rollout.prompt_tokens.tolist() == [5, 6]
    assert rollout.response_tokens.tolist() == [7, 8, 1]
    question, answer = rollout.turns
    assert (question.role, question.text, question.start, question.stop) == ("user", "q", 0, 2)
    assert (answer.role, answer.text, answer.start, answer.stop) == ("assistant", "a", 2, 5)
    assert answer.has_logprobs
    assert not question.has_logprobs
    assert (answer.inference.model_version, answer.inference.inference_time_s) == (3, 0.25)
    assert (rollout.reward, rollout.reward_components, rollout.truncated) == (0.5, {"exact": 0.0}, True)
    assert (rollout.uid, rollout.group_id, rollout.group_size, rollout.policy_version) == ("w.1.0.0", "w.1.0", 2, 3)
    assert (rollout.metadata.worker_id, rollout.metadata.replica_id, rollout.metadata.timestamp) == (
        "w",
        "infer-1",
        5.0,
    )
    assert rollout.metadata.weight_step == 30
    assert rollout.token_arrays[WEIGHT_VERSION].array().tolist() == [-1, -1, 3, 3, 3]
    assert rollout.extra == {"host": "h", "process": "7"}
    assert rollout.sampling.temperature == 0.7


def test_later_turns_append_and_versions_span_all_of_them() -> None:
    played = episode(
        user("q"), reply([5, 6], [7, 1], version=3), user("more"), reply([5, 6, 7, 1, 9, 9], [8, 1], version=4)
    )
    rollout = rollout_of(played, Prompt(example_id="e", text="q"), STAMP, uid="u")
    assert problems(rollout) == []
    assert rollout.tokens.tolist() == [5, 6, 7, 1, 9, 9, 8, 1]
    assert rollout.loss_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert [(turn.start, turn.stop) for turn in rollout.turns] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert (rollout.lowest_version, rollout.highest_version) == (3, 4)


def test_each_token_keeps_the_experts_that_computed_it_when_it_was_sampled() -> None:
    first = np.array([[[1]], [[2]], [[3]], [[255]]], "|u1")
    later = np.array([[[9]], [[9]], [[9]], [[4]], [[5]], [[6]], [[255]]], "|u1")
    played = episode(reply([5, 6], [7, 1], experts=first), user("more"), reply([5, 6, 7, 1, 9], [8, 1], experts=later))
    rollout = rollout_of(played, Prompt(example_id="e", text="q"), STAMP, uid="u")
    assert problems(rollout) == []
    experts = rollout.token_arrays[ROUTED_EXPERTS]
    assert (experts.dtype, experts.shape) == ("|u1", (7, 1, 1))
    assert list(experts.data) == [1, 2, 3, 4, 5, 6, 255]
    without = episode(reply([5, 6], [7, 1], experts=first), reply([5, 6, 7, 1], [8, 1]))
    partly = rollout_of(without, Prompt(example_id="e", text="q"), STAMP, uid="u").token_arrays[ROUTED_EXPERTS]
    assert list(partly.data) == [1, 2, 3, 255, 255, 255]


def test_filtered_sampling_is_recorded_with_the_kept_tokens_of_every_reply() -> None:
    stamp = replace(STAMP, filters=Filters(top_p=0.9))
    masks = [mask_of([[7, 9], [1]], np.array([7, 1])), mask_of([[8, 9, 5], [1]], np.array([8, 1]))]
    first, later = (
        replace(r, mask=m) for r, m in zip((reply([5, 6], [7, 1]), reply([5, 6, 7, 1, 9], [8, 1])), masks, strict=True)
    )
    played = episode(first, user("more"), later)
    rollout = rollout_of(played, Prompt(example_id="e", text="q"), stamp, uid="u")
    assert problems(rollout) == []
    assert rollout.sampling.top_p == 0.9
    assert rollout.token_arrays[SAMPLING_MASK_COUNTS].array().tolist() == [0, 0, 2, 1, 0, 3, 1]
    assert rollout.token_arrays[SAMPLING_MASK].array().tolist() == [7, 9, 1, 8, 9, 5, 1]
    assert is_masked(rollout.loss_mask, rollout.logprobs_mode, rollout.token_arrays)
    without = rollout_of(episode(first, replace(later, mask=None)), Prompt(example_id="e", text="q"), stamp, uid="u")
    assert not is_masked(without.loss_mask, without.logprobs_mode, without.token_arrays)


def test_a_context_that_was_rewritten_is_refused() -> None:
    played = episode(user("q"), reply([5, 6], [7, 1]), reply([5, 7, 1], [8]))
    with pytest.raises(RecordError, match="rewritten"):
        rollout_of(played, Prompt(example_id="e", text="q"), STAMP, uid="u")


def test_an_episode_without_a_reply_is_refused() -> None:
    with pytest.raises(RecordError, match="at least one reply"):
        rollout_of(episode(user("q")), Prompt(example_id="e", text="q"), STAMP, uid="u")


def test_uids_are_the_groups_name_and_the_members_index() -> None:
    assert uids_of("w.1.0", 2) == ["w.1.0.0", "w.1.0.1"]
