"""Parsing of answers: the shapes of vLLM, SGLang and our server, and answers that cannot be trained on."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.inference.answers import Dialect, Sample, VersionSpan, refusal_of, samples_of
from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused

VLLM_COMPLETIONS = {
    "id": "cmpl-7",
    "object": "text_completion",
    "model": "Qwen/Qwen3-0.6B",
    "choices": [
        {
            "index": 0,
            "text": " 4",
            "logprobs": {
                "text_offset": [0, 2],
                "token_logprobs": [-0.1, -0.01],
                "tokens": [" 4", "<|im_end|>"],
                "top_logprobs": [{" 4": -0.1}, {"<|im_end|>": -0.01}],
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [9, 151645],
            "prompt_token_ids": [1, 2, 3],
        }
    ],
    "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
}
VLLM_CHAT = {
    "id": "chatcmpl-7",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " 4", "tool_calls": []},
            "logprobs": {
                "content": [
                    {"token": " 4", "logprob": -0.1, "bytes": [32, 52], "top_logprobs": []},
                    {"token": "<|im_end|>", "logprob": -0.01, "bytes": None, "top_logprobs": []},
                ]
            },
            "finish_reason": "stop",
            "token_ids": [9, 151645],
        }
    ],
    "prompt_token_ids": [1, 2, 3],
}
VLLM_GENERATE = {
    "request_id": "r",
    "prompt_token_ids": [1, 2, 3],
    "output_mode": "tokens",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 151645,
            "token_ids": [9, 151645],
            "logprobs": {
                "content": [
                    {"token_id": 9, "logprob": -0.1, "rank": 1, "top_logprobs": []},
                    {"token_id": 151645, "logprob": -0.01, "rank": 1, "top_logprobs": []},
                ]
            },
            "weight_versions": [{"version": "17", "start": 0, "end": 1}, {"version": "18", "start": 1, "end": 2}],
        }
    ],
}
SGLANG_GENERATE = {
    "text": " 4",
    "output_ids": [9, 151645],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "18",
        "weight_versions": [{"version": "17", "start": 0, "end": 1}, {"version": "18", "start": 1, "end": 2}],
        "output_token_logprobs": [[-0.1, 9, None], [-0.01, 151645, None]],
    },
}
SGLANG_CHAT = {
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " 4", "tool_calls": None},
            "logprobs": {"content": [{"token": " 4", "logprob": -0.1}, {"token": "", "logprob": -0.01}]},
            "finish_reason": "stop",
            "matched_stop": 151645,
            "prompt_token_ids": [1, 2, 3],
            "response_token_ids": [9, 151645],
        }
    ],
    "metadata": {
        "weight_version": "18",
        "weight_versions": [{"version": "17", "start": 0, "end": 1}, {"version": "18", "start": 1, "end": 2}],
    },
}
TOO_LONG = [
    '{"error": {"message": "prompt has 900 tokens", "type": "invalid_request_error", "param": "prompt", '
    '"code": "context_length_exceeded"}}',
    '{"error": {"message": "This model\'s maximum context length is 1024 tokens. However, you requested 16 output '
    'tokens and your prompt contains at least 1009 input tokens.", "type": "BadRequestError", "code": 400}}',
    '{"object": "error", "message": "The decoder prompt (length 1030) is longer than the maximum model length of '
    '1024.", "type": "BadRequestError", "param": null, "code": 400}',
    '{"error": {"message": "The input (1030 tokens) is longer than the model\'s context length (1024 tokens)."}}',
    '{"object": "error", "message": "Requested token count exceeds the model\'s maximum context length of 1024 '
    'tokens. You requested a total of 1040 tokens.", "type": "BadRequestError", "code": 400}',
]
TWO_SPANS = (VersionSpan(label="17", start=0, stop=1), VersionSpan(label="18", start=1, stop=2))


def with_choice(body: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return an answer of one choice, with fields of the choice replaced."""
    return {**body, "choices": [{**body["choices"][0], **change}]}


@pytest.mark.parametrize(
    ("body", "dialect", "text", "spans"),
    [
        (VLLM_COMPLETIONS, "completions", " 4", ()),
        (VLLM_CHAT, "chat", " 4", ()),
        (VLLM_GENERATE, "generate", "", TWO_SPANS),
        (SGLANG_GENERATE, "sglang", " 4", TWO_SPANS),
        (SGLANG_CHAT, "chat", " 4", TWO_SPANS),
    ],
)
def test_every_dialect_gives_the_same_tokens(
    body: dict[str, Any], dialect: Dialect, text: str, spans: tuple[VersionSpan, ...]
) -> None:
    [sample] = samples_of(json.loads(json.dumps(body)), dialect, source="http://h", prompt_tokens=[1, 2, 3])
    assert (sample.text, sample.finish_reason, sample.spans) == (text, "stop", spans)
    assert (sample.truncated, sample.aborted, sample.tool_calls) == (False, False, ())
    assert sample.prompt_tokens.tolist() == [1, 2, 3]
    assert sample.tokens.tolist() == [9, 151645]
    assert sample.logprobs.tolist() == [np.float32(-0.1), np.float32(-0.01)]
    assert (sample.prompt_tokens.dtype, sample.tokens.dtype, sample.logprobs.dtype) == (np.int32, np.int32, np.float32)


def test_choices_come_in_the_order_of_their_index_and_several_sglang_outputs_in_theirs() -> None:
    choice = VLLM_COMPLETIONS["choices"][0]  # type: ignore[index]
    late = {**choice, "index": 1, "finish_reason": "length"}
    samples = samples_of({**VLLM_COMPLETIONS, "choices": [late, choice]}, "completions", source="http://h")
    assert [sample.truncated for sample in samples] == [False, True]
    assert len(samples_of([SGLANG_GENERATE] * 3, "sglang", source="http://h", prompt_tokens=[1])) == 3


def test_tokens_named_as_ids_serve_where_the_list_of_ids_is_missing() -> None:
    content = [{"token": "token_id:9", "logprob": -0.1}, {"token": "token_id:151645", "logprob": -0.01}]
    body = with_choice(VLLM_CHAT, token_ids=None, logprobs={"content": content})
    assert samples_of(body, "chat", source="http://h")[0].tokens.tolist() == [9, 151645]
    completions = {"tokens": ["token_id:9", "token_id:151645"], "token_logprobs": [-0.1, -0.01]}
    body = with_choice(VLLM_COMPLETIONS, token_ids=None, logprobs=completions)
    assert samples_of(body, "completions", source="http://h")[0].tokens.tolist() == [9, 151645]


def test_tool_calls_and_the_name_of_the_server_are_kept() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {**with_choice(VLLM_CHAT, message=message, finish_reason="tool_calls"), "replica_id": "infer-1"}
    [sample] = samples_of(body, "chat", source="http://h")
    assert (sample.text, sample.tool_calls, sample.replica_id) == ("", (call,), "infer-1")
    assert not sample.truncated


@pytest.mark.parametrize(
    "versions",
    [
        {"policy_version": 17},
        {"metadata": {"weight_version": "17"}},
        {"metadata": {"weight_version": "17", "weight_versions": None}},
        {"metadata": {"weight_versions": [{"version": 17, "start": 0, "end": 2}]}},
        {"policy_version": 16, "metadata": {"weight_version": "17"}},
    ],
)
def test_one_version_of_an_answer_covers_all_its_tokens(versions: dict[str, Any]) -> None:
    [sample] = samples_of({**VLLM_COMPLETIONS, **versions}, "completions", source="http://h")
    assert sample.spans == (VersionSpan(label="17", start=0, stop=2),)


def test_a_server_without_weights_and_a_sample_without_tokens_name_no_version() -> None:
    assert samples_of({**VLLM_COMPLETIONS, "policy_version": -1}, "completions", source="http://h")[0].spans == ()
    empty = with_choice(VLLM_GENERATE, token_ids=[], logprobs={"content": []}, weight_versions=[])
    [sample] = samples_of(empty, "generate", source="http://h")
    assert (len(sample.tokens), sample.tokens.dtype, sample.spans) == (0, np.int32, ())


def test_a_span_may_reach_over_tokens_that_a_stop_string_cut_off() -> None:
    spans = [{"version": "17", "start": 0, "end": 2}, {"version": "18", "start": 2, "end": 5}]
    [sample] = samples_of(with_choice(VLLM_GENERATE, weight_versions=spans), "generate", source="http://h")
    assert sample.spans == (VersionSpan(label="17", start=0, stop=2),)


def test_an_aborted_sample_is_told_apart_from_a_truncated_one() -> None:
    meta = {**SGLANG_GENERATE["meta_info"], "finish_reason": {"type": "abort", "message": "Abort"}}  # type: ignore[dict-item]
    [sample] = samples_of({**SGLANG_GENERATE, "meta_info": meta}, "sglang", source="http://h", prompt_tokens=[1])
    assert (sample.aborted, sample.truncated) == (True, False)


@pytest.mark.parametrize(
    ("body", "dialect", "complaint"),
    [
        (with_choice(VLLM_COMPLETIONS, token_ids=None), "completions", "never guessed from text"),
        (with_choice(VLLM_COMPLETIONS, prompt_token_ids=None), "completions", "prompt_token_ids"),
        (with_choice(VLLM_COMPLETIONS, logprobs=None), "completions", "logprob for each"),
        (with_choice(VLLM_COMPLETIONS, token_ids=[9]), "completions", "logprob for each"),
        (with_choice(VLLM_COMPLETIONS, token_ids=[9, 2**31]), "completions", "range of int32"),
        (with_choice(VLLM_COMPLETIONS, token_ids=[9, -1]), "completions", "range of int32"),
        (with_choice(VLLM_COMPLETIONS, token_ids=["9", "8"]), "completions", "list of integers"),
        (with_choice(VLLM_COMPLETIONS, finish_reason=None), "completions", "finish_reason"),
        (with_choice(VLLM_COMPLETIONS, logprobs={"token_logprobs": [-0.1, -9999.0]}), "completions", "not finite"),
        (with_choice(VLLM_COMPLETIONS, logprobs={"token_logprobs": [-0.1, float("nan")]}), "completions", "not finite"),
        (with_choice(VLLM_GENERATE, weight_versions=[{"version": "1", "start": 1, "end": 2}]), "generate", "cover"),
        (with_choice(VLLM_GENERATE, weight_versions=[{"version": "1", "start": 0, "end": 1}]), "generate", "cover"),
        ({"object": "error"}, "chat", "shape"),
        ({"choices": [{"text": "4"}]}, "completions", "shape"),
        ({"choices": 3}, "completions", "shape"),
        ([1, 2], "completions", "shape"),
        ({"text": "4"}, "sglang", "shape"),
        (None, "sglang", "shape"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused_by_the_name_of_its_server(
    body: Any, dialect: Dialect, complaint: str
) -> None:
    with pytest.raises(InferenceRefused, match=complaint) as refusal:
        samples_of(body, dialect, source="http://h:8000")
    assert str(refusal.value).startswith("http://h:8000 ")


@pytest.mark.parametrize("text", TOO_LONG)
def test_a_refusal_for_length_is_told_apart(text: str) -> None:
    assert isinstance(refusal_of(400, text, source="http://h"), ContextTooLong)
    assert not isinstance(refusal_of(500, text, source="http://h"), ContextTooLong)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        *((text, text) for text in ("", "[]", "bad", '{"error": {"code": 400}}')),
        ('{"error": {"message": "n must be at least 1", "code": 400}}', "n must be at least 1"),
        ('{"message": "n must be\\nat least 1"}', "n must be at least 1"),
    ],
)
def test_any_other_refusal_quotes_the_server(text: str, quoted: str) -> None:
    refusal = refusal_of(400, text, source="http://h/v1/completions")
    assert not isinstance(refusal, ContextTooLong)
    assert str(refusal) == f"http://h/v1/completions refused the request: 400 {quoted}"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
FIELDS = (
    "choices", "index", "token_ids", "response_token_ids", "prompt_token_ids", "logprobs", "token_logprobs", "content",
    "message", "tool_calls", "finish_reason", "metadata", "weight_versions", "weight_version", "policy_version",
    "meta_info", "output_ids", "output_token_logprobs", "text", "version", "start", "end",
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Any, Dialect]:
    """An answer of a real shape, some of whose fields hold anything."""
    answers: list[tuple[Any, Dialect]] = [
        (VLLM_COMPLETIONS, "completions"),
        (VLLM_CHAT, "chat"),
        (VLLM_GENERATE, "generate"),
        (SGLANG_GENERATE, "sglang"),
    ]
    body, dialect = draw(st.sampled_from(answers))
    names = draw(st.sets(st.sampled_from(FIELDS), min_size=1, max_size=3))

    def damage(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: draw(json_values) if key in names and draw(st.booleans()) else damage(inner)
                for key, inner in value.items()
            }
        return [damage(inner) for inner in value] if isinstance(value, list) else value

    return damage(body), dialect


@given(damaged())
def test_no_answer_raises_anything_but_a_refusal(answer: tuple[Any, Dialect]) -> None:
    body, dialect = answer
    try:
        samples = samples_of(body, dialect, source="http://h", prompt_tokens=[1, 2, 3])
    except InferenceRefused:
        return
    for sample in samples:
        check(sample)


def check(sample: Sample) -> None:
    assert len(sample.tokens) == len(sample.logprobs)
    assert bool(np.isfinite(sample.logprobs).all())
    edges = [0, *(span.stop for span in sample.spans)]
    assert [span.start for span in sample.spans] == edges[:-1]
    assert not sample.spans or edges[-1] == len(sample.tokens)
