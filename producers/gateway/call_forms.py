"""Requests and answers of model calls, in the forms of the agent, the inference server and the record. Pure.

The gateway adds tokens and logprobs to what the agent requests from the server, and removes them from the answer unless
the agent requested them itself.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blake3 import blake3

from rollstream.producers.episodes.call_sequences import (
    CONSTRAINED,
    PROMPT_ROLE,
    TOOLS,
    CallSequence,
    CallSequences,
    ChatMessage,
    same_messages,
    same_words,
)
from rollstream.producers.inference.answers import Dialect, Sample
from rollstream.producers.inference.requests import OPENAI_NEUTRAL
from rollstream.producers.json_text import readable
from rollstream.topics.errors import RecordError
from rollstream.topics.records import AnswerSpan, CallAnswer, Int32, ModelCall, SamplingParams

ROUTES: Mapping[str, Dialect] = {"chat/completions": "chat", "completions": "completions"}
"""Dialect of each captured route, below the base URL."""
_NOT_IN_DIGEST = {"stream", "stream_options"}
_SHAPING = {
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": None,
    "allowed_token_ids": None,
    "thinking_token_budget": None,
    "watermarking": False,
    "use_beam_search": False,
}
"""Parameters that make the sampled distribution differ from the policy's, each with its neutral value."""
_CONSTRAINTS: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
}
"""Fields that make a server leave out tokens so that the answer has a form, each with the values that do not. An agent
needs that form, so they cannot be removed; the answer's tokens are not the policy's choice, so they are not trained."""
_RECORDED = ("temperature", "max_tokens", "max_completion_tokens", "seed", "stop", "n", *_SHAPING)
_RECORDED_LENGTH = 200
"""Most characters of a constraint that a record keeps."""
_UNFIT = tuple(name for name in _SHAPING if name not in ("top_p", "top_k", "min_p"))
"""Parameters without a field in a rollout: an episode that was sampled with them cannot be trained on."""
_PROMPT_FIELDS = ("prompt_token_ids",)
_ENGINE_FIELDS = (*_PROMPT_FIELDS, "token_ids", "response_token_ids", "weight_versions", "metadata")
"""Fields of an answer that an agent receives only if it asks for tokens, because its client may not know them."""


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent in OpenAI's form, for chats or completions."""

    route: str
    body: Mapping[str, Any]
    digest: str
    """Digest of the fields that are equal when the same request is sent again."""
    prefix: str
    """Beginning of the id of its answer."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the record keeps of the request beside its sampling parameters."""

    @property
    def messages(self) -> Sequence[ChatMessage]:
        """Its messages; a text prompt is one message of a special role, and a prompt of token ids has no messages."""
        if self.route == "chat/completions":
            return self.body["messages"]  # type: ignore[no-any-return]
        prompt = self.body.get("prompt")
        return [{"role": PROMPT_ROLE, "content": prompt}] if isinstance(prompt, str) else []

    @property
    def streamed(self) -> bool:
        """Whether the answer is to be a stream of events."""
        return bool(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of the stream is to count the tokens."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def wants_tokens(self) -> bool:
        """Whether the agent asked for token ids."""
        return bool(self.body.get("return_token_ids"))

    @property
    def wants_logprobs(self) -> bool:
        """Whether the agent asked for log-probabilities."""
        logprobs = self.body.get("logprobs")
        return logprobs is not None and logprobs is not False


def parse_request(route: str, body: Any, idempotency_key: str = "", digest: str = "") -> AgentRequest:
    """Check the fields of a request that the gateway reads; the server checks all others. `digest` is that of the
    request in its own dialect, empty for OpenAI's. Raises RecordError."""
    if not isinstance(body, dict):
        raise RecordError("the body must be a JSON object")
    if route == "chat/completions":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise RecordError("messages must be a non-empty list of objects")
    elif isinstance(body.get("prompt"), list) and not {str, list}.isdisjoint(map(type, body["prompt"])):
        raise RecordError("prompt must be one text or one list of token ids, because a call has one prompt")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RecordError("stream_options must be an object")
    if route == "completions" and not isinstance(body.get("logprobs") or 0, int):
        raise RecordError("logprobs must be an integer")
    prefix = "chatcmpl-" if ROUTES[route] == "chat" else "cmpl-"
    return AgentRequest(route, body, digest or request_digest(route, body, idempotency_key), prefix)


def request_digest(route: str, body: Mapping[str, Any], idempotency_key: str) -> str:
    """Return the digest of a request, equal for every attempt at it, whole or streamed."""
    same = {key: value for key, value in body.items() if key not in _NOT_IN_DIGEST}
    text = json.dumps([route, idempotency_key, same], sort_keys=True, separators=(",", ":"))
    return blake3(text.encode("utf-8", "replace")).hexdigest(length=16)


def server_request(
    request: AgentRequest,
    *,
    model: str,
    temperature: float,
    sampling: Literal["run", "agent"],
) -> dict[str, Any]:
    """Return the body for an inference server of any kind. Its parameters are those that `recorded_sampling` records.

    If `sampling` is agent, the agent's parameters stay, and only missing ones are set.
    """
    body = {name: value for name, value in request.body.items() if value is not None}
    body["model"] = model
    body["return_token_ids"] = True
    if request.route == "chat/completions":
        body["logprobs"] = True
        body.setdefault("top_logprobs", 0)
    else:
        body["logprobs"] = max(1, int(body.get("logprobs") or 0))
    for name in ("temperature", *_SHAPING):
        if sampling == "run" or body.get(name) is None:
            body.pop(name, None)
    return {"temperature": temperature, **OPENAI_NEUTRAL, **body}


def _constraints(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraints on the answer's form that a body contains."""
    return {
        name: body[name] for name, off in _CONSTRAINTS.items() if body.get(name) is not None and body[name] not in off
    }


def _tools_digest(body: Mapping[str, Any]) -> str:
    """Return the digest of the tools, and the template's variables, that a prompt is rendered with; empty if there are
    none."""
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    rendered = [value for value in (tools, body.get("chat_template_kwargs")) if value]
    if not rendered:
        return ""
    return blake3(json.dumps(rendered, sort_keys=True).encode()).hexdigest(length=16)


def previous_turn(request: AgentRequest, known: CallSequences) -> dict[str, Any] | None:
    """Return the tokens of the call that a request continues; None if no such call is known."""
    if (continued := continued_call(request, known)) is None:
        return None
    sequence, index = continued
    return {
        "prompt_token_ids": sequence.prompt.tolist(),
        "token_ids": sequence.call.answers[index].tokens.tolist(),
    }


def continued_call(request: AgentRequest, known: CallSequences) -> tuple[CallSequence, int] | None:
    """Return the call that a request continues, and the number of its answer: the request has its tools, and further
    messages follow its conversation and answer. None if no such call is known."""
    messages = request.messages
    answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers or answers[-1] == len(messages) - 1:
        return None
    last, tools = answers[-1], _tools_digest(request.body)
    for sequence in reversed(known.by_uid.values()):
        if sequence.call.sampling.get(TOOLS) == tools and same_messages(sequence.messages, messages[:last]):
            for index, message in enumerate(answered_messages(sequence.call)):
                if same_words(message, messages[last]):
                    return sequence, index
    return None


def answered_messages(call: ModelCall) -> list[ChatMessage]:
    """Return the messages that a chat call was answered with, in the order of its answers."""
    choices = json.loads(call.body).get("choices", [])
    return [choice.get("message") or {} for choice in sorted(choices, key=lambda choice: choice.get("index", 0))]


def agent_answer(request: AgentRequest, body: Mapping[str, Any], uid: str) -> dict[str, Any]:
    """Return an answer, or one event of a stream, without fields that only the gateway requested, and with id `uid`."""
    hidden = _PROMPT_FIELDS if request.wants_tokens else _ENGINE_FIELDS
    answer = {key: value for key, value in body.items() if key not in hidden}
    answer["id"] = uid
    choices = []
    for choice in body.get("choices") or ():
        kept = {key: value for key, value in choice.items() if key not in hidden}
        if not request.wants_logprobs and "logprobs" in kept:
            kept["logprobs"] = None
        choices.append(kept)
    if "choices" in body:
        answer["choices"] = choices
    return answer


def with_prompt(answer: Mapping[str, Any], prompt: Int32) -> dict[str, Any]:
    """Return a recorded answer with the prompt's token ids, which records omit."""
    ids = prompt.tolist()
    choices = [{**choice, "prompt_token_ids": ids} for choice in answer.get("choices", ())]
    return {**answer, "prompt_token_ids": ids, "choices": choices}


def call_answers(samples: Sequence[Sample], versions: Mapping[str, int]) -> tuple[CallAnswer, ...]:
    """Return the answers of a record; `versions` holds the policy version of each label."""
    return tuple(
        CallAnswer(
            tokens=sample.tokens.astype("<i4"),
            logprobs=sample.logprobs.astype("<f4"),
            spans=tuple(
                AnswerSpan(label=span.label, version=versions.get(span.label, -1), start=span.start, stop=span.stop)
                for span in sample.spans
            ),
            text="\n".join(filter(None, (sample.text, _calls_text(sample.tool_calls)))),
            finish_reason=sample.finish_reason,
        )
        for sample in samples
    )


def _calls_text(calls: Sequence[Any]) -> str:
    """Return calls of tools as people write them, one on each line: `price({"good": "fig"})`."""
    try:
        lines = [f"{call['function']['name']}({call['function']['arguments']})" for call in calls]
    except (KeyError, TypeError):
        return readable(calls)
    # A model may write half of a surrogate pair, which no record can hold.
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def recorded_sampling(route: str, body: Mapping[str, Any]) -> dict[str, str]:
    """Return the sampling parameters that a record keeps of a request to the server, and the digest of its tools."""
    kept = {name: str(body[name]) for name in _RECORDED if body.get(name) is not None}
    if constraints := _constraints(body):
        kept |= {name: str(value)[:_RECORDED_LENGTH] for name, value in constraints.items()}
        kept[CONSTRAINED] = ", ".join(constraints)
    return {**kept, TOOLS: _tools_digest(body)} if ROUTES[route] == "chat" else kept


def sampling_params(sampling: Mapping[str, str], temperature: float) -> SamplingParams:
    """Return recorded parameters in the form of a rollout. Raises RecordError for parameters that are not numbers, and
    for parameters that make logprobs unfit for training and have no field in a rollout."""
    for name in _UNFIT:
        if name in sampling and not _is_neutral(name, sampling[name]):
            raise RecordError(f"its calls were sampled with {name}={sampling[name]}, so they are not the policy's")
    try:
        return SamplingParams(
            temperature=float(sampling.get("temperature", temperature)),
            top_p=float(sampling.get("top_p", 1.0)),
            top_k=max(0, int(sampling.get("top_k", 0))),
            min_p=float(sampling.get("min_p", 0.0)),
        )
    except ValueError as error:
        raise RecordError(f"its calls were sampled with parameters that are not numbers: {error}") from error


def _is_neutral(name: str, text: str) -> bool:
    """Whether the recorded text of a parameter is its neutral value, whichever way the agent wrote the number."""
    neutral = _SHAPING[name]
    if text in ("{}", "[]", str(neutral)):
        return True
    try:
        return neutral is not None and float(text) == neutral
    except ValueError:
        return False
