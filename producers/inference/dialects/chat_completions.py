"""OpenAI's chat completions with tools, and the token ids of vLLM and SGLang: POST /v1/chat/completions.

If the tokens of a conversation's last turn are known and the template can continue from them, only the messages after
that turn's answer are rendered as tokens. Otherwise the whole conversation is.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstream.producers.inference.chat import hermes
from rollstream.producers.inference.chat.conversations import ConversationMemory, last_answer
from rollstream.producers.inference.chat.template import (
    AssistantMessage,
    ChatTemplate,
    Message,
    SampledTurn,
    Tool,
    ToolCall,
    call_object,
)
from rollstream.producers.inference.constraints import Constraints
from rollstream.producers.inference.dialects import fields, sampling_parameters
from rollstream.producers.inference.dialects.dialect import (
    AnswerHeader,
    Dialect,
    StreamedPart,
    VisibleAnswer,
    metadata,
    usage,
)
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice, held_back
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits, SamplingRequest
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.errors import RollstreamError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = {
    **dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "reasoning_content"),
    **{name: name for name in ("tool_call_id", "name")},
}
"""Optional texts of a message, each with the name under which templates read it."""


def parse_messages(value: Any) -> list[Message]:
    """Return the messages of a conversation; fields without a meaning for a model are left out."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message", "messages")
    return [_message(message, f"messages[{position}]") for position, message in enumerate(value)]


def parse_tools(value: Any, choice: Any) -> list[Tool]:
    """Return the tools that a model may call: none if `choice`, the field tool_choice, is "none"."""
    if value is not None and not isinstance(value, list):
        raise BadRequest("tools must be a list", "tools")
    tools = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(value or [])]
    return [] if choice == "none" else tools


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise BadRequest(f"{place} must be an object", place)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{place}.role={fields.shown(role)} must be one of {', '.join(_ROLES)}", f"{place}.role")
    if value.get("function_call"):
        raise BadRequest(f"{place}.function_call is not supported here; use tool_calls", f"{place}.function_call")
    message: Message = {"role": _ROLES[role], "content": _content(value.get("content"), f"{place}.content")}
    calls = value.get("tool_calls")
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise BadRequest(f"{place}.tool_calls must be a list", f"{place}.tool_calls")
        message["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name, meaning in _TEXTS.items():
        text = value.get(name)
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"{place}.{name} must be a string", f"{place}.{name}")
        if text:
            message.setdefault(meaning, text)
    return message


def _content(value: Any, place: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise BadRequest(f"{place} must be a string or a list of parts", place)
    texts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{place}: only parts of type text are supported", place)
    return "".join(map(str, texts))


def _call(value: Any, place: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{place} must be an object with a function that has a name", place)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str | None):
        raise BadRequest(f"{place}.function.arguments must be JSON in a string", place)
    identifier = value.get("id")
    return call_object(function["name"], arguments or "{}", identifier if isinstance(identifier, str) else "")


def _tool(value: Any, place: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{place} must be of type function, and its function must have a name", place)
    return {"type": "function", "function": function}


_OFF = {
    **sampling_parameters.OFF,
    "chat_template": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "functions": ([],),
    "modalities": (["text"],),
}
_HARMLESS = sampling_parameters.HARMLESS | {
    "parallel_tool_calls", "reasoning_effort", "verbosity", "include_reasoning", "separate_reasoning",
}  # fmt: skip
_READ = {
    *sampling_parameters.READ, "messages", "tools", "tool_choice", "response_format", "max_tokens",
    "max_completion_tokens", "logprobs",
    "top_logprobs", "stream", "stream_options", "return_tokens_as_token_ids", "previous_turn",
    "chat_template_kwargs",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A valid request."""

    sampling: SamplingRequest
    messages: Sequence[Message]
    tools: Sequence[Tool]
    variables: Mapping[str, Any]
    """Variables of the chat template."""
    session: str
    logprobs: bool
    tokens_as_ids: bool
    """Whether tokens are named token_id:N instead of by their text."""
    stream: bool
    include_usage: bool


class ChatCompletions(Dialect[ChatRequest]):
    """The dialect of OpenAI's chat completions."""

    prefix = "chatcmpl"
    stream_kind = "chat.completion.chunk"

    def __init__(
        self, tokenizer: TokenCodec, limits: RequestLimits, template: ChatTemplate, memory: ConversationMemory
    ) -> None:
        super().__init__(tokenizer, limits)
        self._template = template
        self._memory = memory
        self._constraints = Constraints(tokenizer, limits.vocab_size, call_markers=hermes.OPEN in template.markers)
        self._stop_ids = frozenset(template.stop_ids) - frozenset(tokenizer.eos_ids)

    def parse(self, body: Mapping[str, Any], session: str) -> ChatRequest:
        """Parse a body and render its conversation."""
        sampling_parameters.check_names(body, _READ, _OFF, _HARMLESS)
        parameters = sampling_parameters.parse_parameters(body, self.limits, stop_token_ids=self._stop_ids)
        top_logprobs = fields.integer(body, "top_logprobs", 0, least=0)
        if top_logprobs:
            raise BadRequest(
                f"top_logprobs={fields.shown(top_logprobs)}: only the sampled token's logprob is known, and `logprobs` "
                "asks for it; leave top_logprobs out, or set it to 0",
                "top_logprobs",
            )
        messages = parse_messages(body.get("messages"))
        tools = parse_tools(body.get("tools"), body.get("tool_choice"))
        variables = fields.mapping(body, "chat_template_kwargs")
        prompt = self.prompt_of(messages, tools, session, self._previous_turn(body), variables)
        sampling_parameters.check_prompt(prompt, "messages", self.limits)
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        max_tokens = sampling_parameters.answer_limit(body, limit, len(prompt), self.limits)
        return ChatRequest(
            sampling=SamplingRequest(
                prompts=[prompt],
                parameters=parameters,
                max_tokens=max_tokens,
                constraint=self._constraints.of(body, tools),
            ),
            messages=messages,
            tools=tools,
            variables=variables,
            session=session,
            logprobs=fields.flag(body, "logprobs"),
            tokens_as_ids=fields.flag(body, "return_tokens_as_token_ids"),
            stream=fields.flag(body, "stream"),
            include_usage=fields.flag(fields.mapping(body, "stream_options"), "include_usage"),
        )

    def prompt_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        session: str,
        previous: SampledTurn | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Return the prompt of a conversation, continued from the tokens of its last turn if they are known.

        `previous` is that turn, if the client sent it. Raises BadRequest if the template refuses the conversation.
        """
        known = last_answer(messages)
        if previous is not None and known is None:
            raise BadRequest("previous_turn is given, but no message follows an answer", "previous_turn")
        with _refusals("chat_template_kwargs"):
            template = self._template.with_variables(variables) if variables else self._template
        turn = previous or self._memory.find(session, messages, tools, variables)
        if turn is not None and known is not None:
            with _refusals("messages"):
                prompt = template.extend(turn, messages, known, tools)
            if prompt is not None:
                return prompt
        with _refusals("messages"):
            return template.render(messages, tools)

    def answer(self, request: ChatRequest, choices: Sequence[SampledChoice], header: AnswerHeader) -> dict[str, Any]:
        """Return a chat.completion."""
        return {
            **header.fields("chat.completion"),
            "prompt_token_ids": list(request.sampling.prompts[0]),
            "choices": [
                {
                    **self._ending(choice),
                    "message": self._message(request, choice),
                    "logprobs": self._logprobs(request, choice, 0),
                    "token_ids": list(choice.tokens),
                    "response_token_ids": list(choice.tokens),
                    "prompt_token_ids": list(choice.prompt),
                    **choice.version_fields,
                }
                for choice in choices
            ],
            **metadata(choices),
            "usage": usage(request.sampling, choices),
        }

    def visible(self, request: ChatRequest, choice: SampledChoice) -> VisibleAnswer:
        """Return content and reasoning, and the tool calls if the answer is complete."""
        complete = choice.finish_reason is not None
        message = self._parsed(choice, complete=complete)
        stops = request.sampling.parameters.stop
        content = message.content
        if isinstance(choice.stop_reason, str):
            content = content.partition(choice.stop_reason)[0]
        if complete:
            return VisibleAnswer(text=content, reasoning=message.reasoning, tool_calls=message.tool_calls)
        markers = (*self._template.markers, *stops)
        content = held_back(content, markers)
        # Line breaks alone are not content if calls follow.
        return VisibleAnswer(text=content if content.strip() else "", reasoning=held_back(message.reasoning, markers))

    def _parsed(self, choice: SampledChoice, *, complete: bool = True) -> AssistantMessage:
        """Parse the answer without a stop token of the request, which is no part of its content."""
        if choice.stop_reason is None:
            return self._template.parse(SampledTurn(choice.prompt, choice.tokens), text=choice.text, complete=complete)
        tokens = choice.tokens
        if isinstance(choice.stop_reason, int) and choice.stop_reason not in self._template.stop_ids:
            tokens = tokens[:-1]
        return self._template.parse(SampledTurn(choice.prompt, tokens), complete=complete)

    def part(self, request: ChatRequest, part: StreamedPart, header: AnswerHeader) -> dict[str, Any]:
        """Return a chat.completion.chunk."""
        choice = part.choice
        delta: dict[str, Any] = {"role": "assistant"} if part.first else {}
        if part.text or (part.first and not part.last):
            delta["content"] = part.text
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.tool_calls:
            delta["tool_calls"] = [
                {"index": position, **call} for position, call in enumerate(_calls(choice, part.tool_calls))
            ]
        return {
            **header.fields(self.stream_kind),
            **({"prompt_token_ids": list(choice.prompt)} if part.first else {}),
            "choices": [
                {
                    **self._ending(choice, called=bool(part.tool_calls)),
                    "delta": delta,
                    "logprobs": self._logprobs(request, choice, part.start),
                    "token_ids": list(part.tokens),
                    **(choice.version_fields if part.last else {}),
                }
            ],
            **(metadata([choice]) if part.last else {}),
        }

    def remember(self, request: ChatRequest, choice: SampledChoice) -> None:
        """Remember the tokens of the turn, so that the next turn continues from them."""
        message = self._message(request, choice)
        answer = parse_messages([message])
        self._memory.add(
            request.session,
            [*request.messages, *answer],
            request.tools,
            request.variables,
            SampledTurn(choice.prompt, choice.tokens),
        )

    def _previous_turn(self, body: Mapping[str, Any]) -> SampledTurn | None:
        previous = fields.mapping(body, "previous_turn")
        if not previous:
            return None
        prompt, sampled = (
            fields.token_ids(previous.get(name), f"previous_turn.{name}", self.limits.vocab_size)
            for name in ("prompt_token_ids", "token_ids")
        )
        if not prompt:
            raise BadRequest(
                "previous_turn holds no prompt_token_ids; send prompt_token_ids and token_ids as the server gave them",
                "previous_turn",
            )
        return SampledTurn(prompt, sampled)

    def _ending(self, choice: SampledChoice, *, called: bool | None = None) -> dict[str, Any]:
        called = bool(self._parsed(choice).tool_calls) if called is None else called
        return {
            "index": choice.index,
            "finish_reason": "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _message(self, request: ChatRequest, choice: SampledChoice) -> dict[str, Any]:
        visible = self.visible(request, choice)
        message: dict[str, Any] = {"role": "assistant", "content": visible.text}
        if visible.reasoning:
            message["reasoning_content"] = visible.reasoning
        if visible.tool_calls:
            message["content"] = visible.text or None
            message["tool_calls"] = _calls(choice, visible.tool_calls)
        return message

    def _logprobs(self, request: ChatRequest, choice: SampledChoice, start: int) -> dict[str, Any] | None:
        if not request.logprobs:
            return None
        return {"content": [self._logprob(request, choice, i) for i in range(start, len(choice.tokens))]}

    def _logprob(self, request: ChatRequest, choice: SampledChoice, position: int) -> dict[str, Any]:
        token = choice.tokens[position]
        text = self.tokenizer.decode([token])
        return {
            "token": f"token_id:{token}" if request.tokens_as_ids else text,
            "token_id": token,
            "logprob": float(choice.logprobs[position]),
            "bytes": list(text.encode(errors="replace")),
            "top_logprobs": [],
        }


@contextmanager
def _refusals(param: str) -> Iterator[None]:
    try:
        yield
    except (RollstreamError, ValueError) as error:
        raise BadRequest(str(error), param) from error


def _calls(choice: SampledChoice, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return OpenAI's tool call objects. Equal tokens give equal identifiers, so that answers are reproducible."""
    digest = hashlib.blake2b(digest_size=8)
    for tokens in (choice.prompt, choice.tokens):
        digest.update(np.asarray(tokens, "<i8").tobytes())
    return [
        call_object(call.name, call.arguments, f"call_{digest.hexdigest()}{position:04x}")
        for position, call in enumerate(calls)
    ]
