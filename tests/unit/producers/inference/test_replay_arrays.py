"""The experts of tokens in the answers of engines."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from rollstream.producers.inference.answers import samples_of
from rollstream.producers.inference.errors import InferenceRefused
from rollstream.producers.inference.replay_arrays import experts_of, joined_masks, mask_of

# A prompt of 3 tokens and an answer of 2: the last token was not computed.
ROWS = np.arange(4 * 2 * 2, dtype="<i4").reshape(4, 2, 2)
PLACED = [*ROWS.tolist(), [[255, 255], [255, 255]]]


def npy(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_the_experts_of_vllm_are_placed_at_their_tokens() -> None:
    experts = experts_of(npy(ROWS), 3, 2)
    assert experts is not None
    assert (experts.dtype.str, experts.tolist()) == ("|u1", PLACED)


def test_experts_of_the_answer_alone_follow_those_of_the_prompt() -> None:
    apart = experts_of(npy(ROWS[3:]), 3, 2, prompt_value=npy(ROWS[:3]))
    assert apart is not None
    assert apart.tolist() == PLACED
    alone = experts_of(npy(ROWS[3:]), 3, 2)
    assert alone is not None
    assert alone.tolist() == [*([[[255, 255], [255, 255]]] * 3), *PLACED[3:]]


def test_sglang_answers_flat_numbers() -> None:
    answer = {
        "text": "",
        "output_ids": [7, 8],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 7], [-1.0, 8]],
            "routed_experts": base64.b64encode(ROWS.tobytes()).decode(),
        },
    }
    [sample] = samples_of(answer, "sglang", source="s", prompt_tokens=[1, 2, 3])
    assert sample.experts is not None
    assert sample.experts.tolist() == [*ROWS.reshape(4, 4).tolist(), [255] * 4]


def test_many_experts_take_two_bytes() -> None:
    experts = experts_of(npy(ROWS + 255), 3, 2)
    assert experts is not None
    assert (experts.dtype.str, experts[-1].tolist()) == ("<u2", [[65535, 65535], [65535, 65535]])


def test_masks_are_ragged_and_joined_at_the_tokens_of_their_replies() -> None:
    first, later = mask_of([[7, 9], [8]], np.array([7, 8])), mask_of([[2, 1, 3]], np.array([1]))
    joined = joined_masks([(3, first), (6, later)], 7)
    assert joined is not None
    assert (joined.counts.tolist(), joined.tokens.tolist()) == ([0, 0, 0, 2, 1, 0, 3], [7, 9, 8, 2, 1, 3])
    assert joined_masks([(3, first), (6, None)], 7) is None
    assert mask_of([[7], []], np.array([7, 8])) is None


@pytest.mark.parametrize("value", [[[7]], [[7], [9]], [[7], [8, -1]], [[7], [8, 0.5]], [[7], [8, 2**31]], 3])
def test_masks_that_cannot_be_those_of_the_tokens_are_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        mask_of(value, np.array([7, 8]))


@pytest.mark.parametrize(
    "value",
    [
        npy(ROWS[:3]),
        npy(ROWS - 1),
        npy(ROWS + 2**16),
        npy(ROWS.astype("<f4")),
        npy(ROWS[..., None]),
        npy(ROWS)[:-8],
        "not base64!",
        base64.b64encode(b"123").decode(),
        7,
    ],
)
def test_experts_that_cannot_be_those_of_the_tokens_are_refused(value: Any) -> None:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"token_logprobs": [-1.0, -1.0]},
        "routed_experts": value,
    }
    with pytest.raises(InferenceRefused, match="shape that is not valid"):
        samples_of({"choices": [choice]}, "completions", source="s", prompt_tokens=[1, 2, 3])
