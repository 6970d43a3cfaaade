"""Only a call with the same tools is continued, and only calls sampled from the policy are trained on."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from rollstream.producers.episodes.branches import branches_of
from rollstream.producers.episodes.call_sequences import CallSequences, token_digest
from rollstream.producers.gateway.call_forms import (
    AgentRequest,
    call_answers,
    continued_call,
    parse_request,
    previous_turn,
    recorded_sampling,
    sampling_params,
    server_request,
)
from rollstream.producers.inference.answers import Sample
from rollstream.topics.errors import RecordError
from rollstream.topics.records import CallAnswer, ModelCall, SamplingParams

CHAT = "chat/completions"
QUESTION = {"role": "user", "content": "8+9?"}
ANSWER = {"role": "assistant", "content": "17"}
GO_ON = {"role": "user", "content": "sure?"}
TURN = {"prompt_token_ids": [1, 2], "token_ids": [3]}


def tools(name: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}}]


def chat(*messages: dict[str, Any], **fields: Any) -> AgentRequest:
    return parse_request(CHAT, {"messages": list(messages), **fields})


def recorded(request: AgentRequest) -> ModelCall:
    """The record of a call that was answered with 17."""
    prompt = np.array([1, 2], "<i4")
    body = server_request(request, model="m", temperature=1.0, sampling="run")
    return ModelCall(
        session="g.0",
        uid="c",
        request=request.digest,
        prompt=prompt,
        prompt_digest=token_digest(prompt),
        answers=(CallAnswer(tokens=np.array([3], "<i4"), logprobs=np.array([-0.5], "<f4")),),
        messages=json.dumps(request.messages),
        body=json.dumps({"choices": [{"index": 0, "message": ANSWER}]}),
        sampling=recorded_sampling(CHAT, body),
    )


@pytest.mark.parametrize(
    ("text", "calls", "turn"),
    [
        ("17", (), "17"),
        ("", [{"function": {"name": "sum", "arguments": '{"a": "\ud83d"}'}}], 'sum({"a": "\\ud83d"})'),
        ("Let me see.", [{"function": {"name": n, "arguments": "{}"}} for n in "ab"], "Let me see.\na({})\nb({})"),
        ("", ["sum"], '["sum"]'),
    ],
)
def test_the_text_of_an_answer_has_its_calls_as_people_write_them(text: str, calls: Any, turn: str) -> None:
    sample = Sample(
        text=text,
        finish_reason="stop",
        prompt_tokens=np.array([1], "<i4"),
        tokens=np.array([2], "<i4"),
        logprobs=np.array([-0.5], "<f4"),
        spans=(),
        tool_calls=calls,
    )
    [answer] = call_answers([sample], {})
    assert answer.text == turn


@pytest.mark.parametrize(
    ("before", "after", "continued"),
    [
        ({}, {}, True),
        ({}, {"tools": [], "tool_choice": "none"}, True),
        ({"tools": tools("search")}, {"tools": tools("search"), "tool_choice": "auto"}, True),
        ({"tools": tools("search")}, {"tools": tools("read")}, False),
        ({"tools": tools("search")}, {"tools": tools("search"), "tool_choice": "none"}, False),
        ({"tools": tools("search")}, {}, False),
        ({}, {"tools": tools("search")}, False),
        ({}, {"chat_template_kwargs": {}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, False),
    ],
)
def test_only_a_request_with_the_tools_and_template_variables_of_a_call_continues_it(
    before: dict[str, Any], after: dict[str, Any], continued: bool
) -> None:
    known = CallSequences([recorded(chat(QUESTION, **before))])
    assert previous_turn(chat(QUESTION, ANSWER, GO_ON, **after), known) == (TURN if continued else None)


def call_of(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("question", "answer", "continued"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "8+"}, {"type": "text", "text": "9?"}]}, ANSWER, True),
        (QUESTION, {"role": "assistant", "content": "17\n", "tool_calls": None}, True),
        (QUESTION | {"name": None}, ANSWER, True),
        (QUESTION | {"name": "a"}, ANSWER, False),
        ({"role": "user", "content": "8+9? "}, ANSWER, False),
        (QUESTION, {"role": "assistant", "content": " 17"}, False),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, ANSWER, False),
    ],
)
def test_a_history_in_other_words_of_the_api_is_continued(
    question: dict[str, Any], answer: dict[str, Any], continued: bool
) -> None:
    known = CallSequences([recorded(chat(QUESTION))])
    assert previous_turn(chat(question, answer, GO_ON), known) == (TURN if continued else None)


@pytest.mark.parametrize(
    ("repeated", "continued"),
    [
        ('{"city":"Paris","days":[1,2]}', True),
        ('{"days": [1, 2.0], "city": "Paris"}', True),
        ('{"city": "Paris", "days": [true, 2]}', False),
        ('{"city": "Lyon", "days": [1, 2]}', False),
        ("{broken", False),
    ],
)
def test_arguments_of_a_call_may_come_back_in_another_spelling(repeated: str, continued: bool) -> None:
    sent = call_of('{"city": "Paris", "days": [1.0, 2]}')
    call = dataclasses.replace(recorded(chat(QUESTION)), body=json.dumps({"choices": [{"index": 0, "message": sent}]}))
    result = {"role": "tool", "tool_call_id": "1", "content": "sun"}
    request = chat(QUESTION, call_of(repeated), result)
    assert previous_turn(request, CallSequences([call])) == (TURN if continued else None)


def test_a_history_that_ends_with_the_answer_continues_nothing() -> None:
    known = CallSequences([recorded(chat(QUESTION))])
    assert previous_turn(chat(QUESTION, ANSWER), known) is None


def test_the_digest_of_the_tools_is_on_the_call_and_not_in_its_rollout() -> None:
    call = recorded(chat(QUESTION, tools=tools("search")))
    assert call.sampling["tools"]
    (branch,) = branches_of([call])
    neutral = {"top_p": "1.0", "frequency_penalty": "0.0", "presence_penalty": "0.0"}
    assert branch.turns[-1].inference.sampling_params == {"temperature": "1.0", **neutral}


REMOVED: dict[str, Any] = {
    "min_tokens": 5,
    "ignore_eos": True,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "thinking_token_budget": 0,
    "watermarking": True,
    "use_beam_search": True,
}
CONSTRAINTS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "structured_outputs": {"choice": ["a"]},
    "guided_json": {},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": "root ::= a",
}


@pytest.mark.parametrize("name", [*REMOVED])
def test_what_samples_from_another_distribution_is_removed(name: str) -> None:
    body = server_request(chat(QUESTION, **{name: REMOVED[name]}), model="m", temperature=1.0, sampling="run")
    assert name not in body


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 1, "top_k": 20}])
def test_a_server_is_told_to_sample_from_the_policys_own_distribution(fields: dict[str, Any]) -> None:
    body = server_request(chat(QUESTION, **fields), model="m", temperature=0.7, sampling="run")
    assert (body["temperature"], body["top_p"]) == (0.7, 1.0)
    assert (body["frequency_penalty"], body["presence_penalty"]) == (0.0, 0.0)
    assert not {"top_k", "min_p", "repetition_penalty"} & {*body}, "a server of OpenAI's API alone may refuse them"
    assert sampling_params(recorded_sampling(CHAT, body), 1.0) == SamplingParams(temperature=0.7)


@pytest.mark.parametrize("sampling", ["run", "agent"])
@pytest.mark.parametrize("name", [*CONSTRAINTS])
def test_a_constraint_on_the_form_of_an_answer_reaches_the_server_and_the_record(name: str, sampling: Any) -> None:
    body = server_request(chat(QUESTION, **{name: CONSTRAINTS[name]}), model="m", temperature=1.0, sampling=sampling)
    assert body[name] == CONSTRAINTS[name]
    recorded = recorded_sampling(CHAT, body)
    assert (recorded["constrained"], recorded[name]) == (name, str(CONSTRAINTS[name]))


def test_a_tool_that_must_be_called_is_a_constraint_and_the_free_forms_are_none() -> None:
    forced = {"type": "function", "function": {"name": "search"}}
    free = {"response_format": {"type": "text"}, "tool_choice": "auto", "guided_json": None}
    for fields, constraints in ((free, None), ({**free, "tool_choice": forced}, "tool_choice")):
        body = server_request(chat(QUESTION, **fields), model="m", temperature=1.0, sampling="run")
        assert body["tool_choice"] == fields["tool_choice"]
        assert recorded_sampling(CHAT, body).get("constrained") == constraints


@pytest.mark.parametrize(("name", "value"), [*REMOVED.items()])
def test_with_the_agents_parameters_such_a_call_is_sent_but_not_trained_on(name: str, value: Any) -> None:
    body = server_request(chat(QUESTION, **{name: value}), model="m", temperature=1.0, sampling="agent")
    assert body[name] == value
    with pytest.raises(RecordError, match=f"its calls were sampled with {name}="):
        sampling_params(recorded_sampling(CHAT, body), 1.0)


def test_parameters_at_their_neutral_values_are_trained_on() -> None:
    neutral = {"min_tokens": 0, "ignore_eos": False, "bad_words": [], "allowed_token_ids": [], "logit_bias": {}}
    free = {"response_format": {"type": "text"}, "tool_choice": "none"}
    body = server_request(chat(QUESTION, **neutral, **free), model="m", temperature=1.0, sampling="agent")
    assert sampling_params(recorded_sampling(CHAT, body), 0.5) == SamplingParams(temperature=1.0)


@pytest.mark.parametrize("fields", [{}, dict.fromkeys(["temperature", "top_p", "top_k", "n", "top_logprobs", "stop"])])
def test_a_call_without_parameters_is_sent_with_those_that_its_record_shows(fields: dict[str, Any]) -> None:
    body = server_request(chat(QUESTION, **fields), model="m", temperature=0.7, sampling="agent")
    sent = {name: body[name] for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty")}
    assert sent == {"temperature": 0.7, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert None not in body.values()
    assert recorded_sampling(CHAT, body) == {**{name: str(value) for name, value in sent.items()}, "tools": ""}
    assert sampling_params(recorded_sampling(CHAT, body), 1.0) == SamplingParams(temperature=0.7)


def test_with_the_agents_parameters_those_that_it_sends_stay() -> None:
    own = {"temperature": 0.0, "top_p": 0.9, "top_k": 20, "presence_penalty": 0.5}
    body = server_request(chat(QUESTION, **own), model="m", temperature=0.7, sampling="agent")
    assert {name: body[name] for name in own} == own


PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("value", [2, 0.5, float("nan"), "high"])
def test_a_penalty_at_any_other_value_is_not_trained_on(name: str, value: Any) -> None:
    body = server_request(chat(QUESTION, **{name: value}), model="m", temperature=1.0, sampling="agent")
    with pytest.raises(RecordError, match=f"its calls were sampled with {name}={value}"):
        sampling_params(recorded_sampling(CHAT, body), 1.0)


def test_the_call_that_a_refused_request_would_have_continued_is_found_by_its_messages() -> None:
    known = CallSequences([recorded(chat(QUESTION))])
    continued = continued_call(chat(QUESTION, ANSWER, GO_ON), known)
    assert continued is not None
    assert (continued[0].call.uid, continued[1]) == ("c", 0)
    assert continued_call(chat(GO_ON), known) is None
