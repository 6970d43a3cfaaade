"""Environments of messages: conversations that the policy's chat template renders, with Python functions as tools.

A conversation goes to the policy as an agent's does, over OpenAI's protocol. So its server renders it, and what it
sampled is recorded token by token. Nothing here knows tokens, groups or versions.
"""

import inspect
import json
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from rollstream.producers.environments.environment import Endpoint, Prompt, Score, Split
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.wire.media import sendable

Dialect = Literal["chat", "responses"]
DIALECTS: tuple[Dialect, ...] = typing.get_args(Dialect)
"""OpenAI's protocols in which a policy can be asked."""
ChatMessage = Mapping[str, Any]
"""A message in the format of OpenAI's protocol."""
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


class PolicyUnreachable(RollstreamError):
    """The policy's address answered neither with a message nor with a refusal because of length."""


class ToolCall(NamedTuple):
    """A call of a tool by the policy."""

    name: str
    arguments: str
    """JSON text, as the policy wrote it."""
    id: str = "call-0"


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """A reply of the policy in a conversation."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    """Whether a token limit cut it off; one without text and calls had no room in the policy's context."""

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message of the conversation."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        texts = {"content": self.text} if self.text else {}
        return {"role": "assistant", **texts, **({"tool_calls": calls} if calls else {})}


Ask = Callable[[Sequence[ChatMessage], Sequence[Mapping[str, Any]]], Awaitable[ChatReply]]
"""Returns the policy's reply to messages, given descriptions of tools."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that the policy may call."""

    schema: Mapping[str, Any]
    """OpenAI's description: {"type": "function", "function": {"name", "description", "parameters"}}."""
    answer: Callable[[str], Awaitable[str]]
    """Returns the answer to a call, given the JSON text of its arguments."""

    @property
    def name(self) -> str:
        """Name by which the policy calls it."""
        return str(self.schema["function"]["name"])


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return a Python function as a tool: described by its type hints and its docstring, as in TRL and transformers.

    The first part of the docstring describes the function, and its section `Args:` the arguments, one a line, as
    `name: text`. Arguments of a wrong type, and errors that the function raises, are answers that begin with `error`.
    The function may be a coroutine. Raises ConfigurationError for a parameter without a type hint that JSON expresses.
    """
    name = getattr(function, "__name__", type(function).__name__)
    description, about = _documented(inspect.getdoc(function) or "")
    fields = []
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in _NAMED or parameter.name not in hints:
                raise TypeError(f"the parameter {parameter} has no type hint, or no name to pass it by")
            hint = hints[parameter.name]
            if parameter.name in about:
                hint = Annotated[hint, msgspec.Meta(description=about[parameter.name])]
            default = () if parameter.default is parameter.empty else (_default(parameter.default),)
            fields.append((parameter.name, hint, *default))
        arguments_type = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        described = msgspec.json.schema(arguments_type)
    except (TypeError, NameError, ValueError) as error:
        raise ConfigurationError(f"the function {name} cannot be a tool: {error}") from error
    definitions = described["$defs"]
    parameters = definitions.pop(described["$ref"].rpartition("/")[2])
    parameters = {key: value for key, value in parameters.items() if key not in ("title", "additionalProperties")}
    parameters |= {"$defs": definitions} if definitions else {}
    shown = {"name": name, **({"description": description} if description else {}), "parameters": parameters}

    async def answer(arguments: str) -> str:
        try:
            given = msgspec.json.decode(arguments or "{}", type=arguments_type)
            result = function(**{field: getattr(given, field) for field in arguments_type.__struct_fields__})
            result = await result if inspect.isawaitable(result) else result
        except (Exception, RecursionError) as error:
            return f"error: {error if isinstance(error, msgspec.MsgspecError) else repr(error)}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    return Tool(schema={"type": "function", "function": shown}, answer=answer)


def _made(tool: Callable[..., Any] | Tool) -> Tool:
    return tool if isinstance(tool, Tool) else tool_of(tool)


def schemas_of(tools: Sequence[Callable[..., Any] | Tool | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return OpenAI's descriptions of tools, of which some may be descriptions already. Raises as `tool_of` does."""
    return [tool if isinstance(tool, Mapping) else _made(tool).schema for tool in tools]


class Chat:
    """One conversation with the policy. `messages` holds it so far."""

    def __init__(self, ask: Ask, tools: Sequence[Callable[..., Any] | Tool] = (), system: str = "") -> None:
        """Raises ConfigurationError for a function that cannot be a tool."""
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._ask = ask
        self._tools = {tool.name: tool for tool in map(_made, tools)}

    async def __call__(self, *messages: str | ChatMessage) -> ChatReply:
        """Add messages, of which a text is the user's, and return the policy's reply, which is added, too.

        A part {"type": "image", "image": ...} of a message may hold the bytes of a file or an image of Pillow.
        """
        self.messages += [{"role": "user", "content": m} if isinstance(m, str) else sendable(m) for m in messages]
        reply = await self._ask(self.messages, [tool.schema for tool in self._tools.values()])
        if reply.text or reply.calls:
            self.messages.append(reply.message)
        return reply

    async def until_answer(self, *messages: str | ChatMessage, turns: int) -> ChatReply:
        """Ask, and answer calls of tools until a reply has none or is truncated, or the policy has had its turns.

        Returns the last reply.
        """
        reply = await self(*messages)
        for _turn in range(turns - 1):
            if not reply.calls or reply.truncated:
                break
            reply = await self(*await self.answers(reply))
        return reply

    async def answers(self, reply: ChatReply) -> list[ChatMessage]:
        """Run the tools that a reply calls, one after the other, and return their answers as messages."""
        return [{"role": "tool", "tool_call_id": call.id, "content": await self._answer(call)} for call in reply.calls]

    async def _answer(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        return await tool.answer(call.arguments) if tool else f"error: there is no tool {call.name}"


class ChatEnvironment(ABC):
    """An environment of messages, rendered by the policy's chat template.

    Subclasses define prompts and `score`, or play several turns in a `run` of their own.
    """

    name: str
    max_tokens: int
    """Maximum number of tokens in a reply."""
    system: str = ""
    """Text of the system's message; without one the template's own, if it has one."""
    tools: Sequence[Callable[..., Any] | Tool] = ()
    """Functions that the policy may call, with type hints and docstrings as `tool_of` needs them."""
    turns: int = 8
    """Maximum number of replies of the policy in the `run` of this class."""

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The problems of a split, in an order that is the same in every process."""

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Score the last reply; its text is empty if the policy called a tool in its last turn."""
        raise NotImplementedError(f"environment {self.name} has neither `score` nor a `run` of its own")

    def tools_for(self, prompt: Prompt) -> Sequence[Callable[..., Any] | Tool]:
        """The tools of one episode; functions made here may keep its state."""
        return self.tools

    async def run(self, prompt: Prompt, chat: Chat) -> Score:
        """Play one episode: ask, answer calls of tools, and score the last reply."""
        reply = await chat.until_answer(prompt.text, turns=self.turns)
        return self.score(prompt, "" if reply.calls else reply.text, reply.truncated)

    async def converse(self, prompt: Prompt, ask: Ask) -> Score:
        """Play one episode with a policy that `ask` asks, such as `ScriptedPolicy(...).ask` in a test."""
        return await self.run(prompt, Chat(ask, self.tools_for(prompt), self.system))

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Play one episode with the policy at an endpoint. Raises PolicyUnreachable if it gives no answer."""
        async with policy_at(endpoint, max_tokens=self.max_tokens) as ask:
            return await self.converse(prompt, ask)


@asynccontextmanager
async def policy_at(
    endpoint: Endpoint, *, max_tokens: int, dialect: Dialect = "chat", **sampling: Any
) -> AsyncIterator[Ask]:
    """Yield the function that asks the policy at an endpoint, with these sampling parameters.

    In the dialect `responses` it asks in one conversation, which only grows.
    """
    import aiohttp  # Imported here, because a learner loads environments, too, and aiohttp reads all certificates.

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as session:
        post = partial(_post, session, endpoint)
        if dialect == "responses":
            yield _Responses(post, {"max_output_tokens": max_tokens, **sampling}).ask
        else:
            yield partial(_ask, post, {"max_tokens": max_tokens, **sampling})


_Post = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any] | None]]


async def _post(session: Any, endpoint: Endpoint, route: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a body; None if the policy's context has no room for one. Raises PolicyUnreachable."""
    import aiohttp

    try:
        async with session.post(f"{endpoint.base_url}/{route}", json={"model": endpoint.model, **body}) as response:
            text = await response.text()
    except aiohttp.ClientError as error:
        raise PolicyUnreachable(f"{endpoint.base_url} did not answer: {error!r}") from error
    if response.status == 400 and "context" in text:
        return None
    if response.status != 200:
        raise PolicyUnreachable(f"{endpoint.base_url} answered {response.status}: {text[:200]}")
    answer: dict[str, Any] = json.loads(text)
    return answer


class _Responses:
    """Asks in OpenAI's Responses: each request has the new messages, and continues the response before it."""

    def __init__(self, post: _Post, sampling: Mapping[str, Any]) -> None:
        self._post, self._sampling = post, sampling
        self._previous: str | None = None
        self._sent = 0

    async def ask(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> ChatReply:
        functions = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
        # The reply, which the last response holds, follows the messages that were sent.
        new = [message for message in messages[self._sent :] if message["role"] != "assistant"]
        body = {"input": [_item(message) for message in new], "previous_response_id": self._previous, **self._sampling}
        answer = await self._post("responses", {**body, **({"tools": functions} if tools else {})})
        if answer is None:
            return ChatReply(truncated=True)
        self._previous, self._sent = answer["id"], len(messages)
        items = answer["output"]
        texts = (part["text"] for item in items if item["type"] == "message" for part in item["content"])
        calls = (item for item in items if item["type"] == "function_call")
        return ChatReply(
            text="".join(texts),
            calls=tuple(ToolCall(call["name"], call["arguments"], call["call_id"]) for call in calls),
            truncated=answer["status"] == "incomplete",
        )


def _item(message: ChatMessage) -> Mapping[str, Any]:
    """Return a message, or the answer of a tool, as an item of the input of a response."""
    if message["role"] != "tool":
        return message
    return {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}


async def _ask(
    post: _Post,
    sampling: Mapping[str, Any],
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
) -> ChatReply:
    answer = await post("chat/completions", {"messages": messages, **({"tools": tools} if tools else {}), **sampling})
    if answer is None:
        return ChatReply(truncated=True)
    choice = answer["choices"][0]
    message = choice["message"]
    return ChatReply(
        text=message.get("content") or "",
        calls=tuple(
            ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"])
            for call in message.get("tool_calls") or ()
        ),
        truncated=choice.get("finish_reason") == "length",
    )


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring, and those of its arguments by name."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, indent, newest = "", 0, ""
    for line in text.splitlines():
        if not line[:1].isspace() and (heading := _SECTION.fullmatch(line)):
            section, indent = heading[1], 0
        elif not section:
            description.append(line)
        elif section.startswith(("Arg", "Par")) and line.strip():
            # Lines that are indented further than the first one continue it.
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            if depth <= indent and (argument := _ARGUMENT.fullmatch(line.strip())):
                newest = argument[1]
                arguments[newest] = argument[2]
            elif newest:
                arguments[newest] = f"{arguments[newest]} {line.strip()}"
    return " ".join(" ".join(description).split()), arguments


def _default(value: Any) -> Any:
    return msgspec.field(default_factory=lambda: value) if isinstance(value, list | dict | set) else value
