"""OpenAI's Responses: a request as a chat request, a chat answer as a response or its events. Pure.

A response is a call of its session: `previous_response_id` continues the recorded call, in any gateway. Every call is
recorded, so `store` changes nothing: a response can be continued as long as its session is open.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.call_forms import answered_messages
from rollstream.producers.gateway.dialects.answer_blocks import (
    AnswerStream,
    Block,
    ChatForm,
    Event,
    call_of,
    function_tool,
    objects,
    text_of,
    unsupported,
)
from rollstream.producers.inference.dialects import fields
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.dialects.sampling_parameters import check_names

PREFIX = "resp_"
_READ = {
    "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls",
    "max_output_tokens", "temperature", "top_p", "text", "include", "stream",
}  # fmt: skip
_HARMLESS = {
    "model", "metadata", "client_metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "reasoning", "stream_options",
}  # fmt: skip
_OFF: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "prompt": (None,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_INCLUDED = ("reasoning.encrypted_content",)
"""Accepted without effect: reasoning is in the items in plain text."""
_TEXTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_SEARCHES = ("web_search", "web_search_preview")
"""Tools that OpenAI runs and Codex always offers; nobody runs them here, so the model is not told of them."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_INSTRUCTED = "instructions"
"""Note of a call whose first message holds the instructions, which do not carry over to the next response."""


def chat_request(body: Mapping[str, Any], known: CallSequences) -> ChatForm:
    """Return a request as a chat request; `known` are the calls of its session. Raises BadRequest."""
    check_names(body, _READ, _OFF, _HARMLESS)
    for included in body.get("include") or ():
        if included not in _INCLUDED:
            raise BadRequest(f"include: {fields.shown(included)} is not supported here; leave it out", "include")
    instructions = text_of(body.get("instructions"), "instructions", _TEXTS)
    chat = {
        "messages": [
            *([{"role": "system", "content": instructions}] if instructions else []),
            *_previous_messages(body.get("previous_response_id"), known),
            *_messages(body),
        ],
        "tools": [_tool(tool, space, place) for tool, space, place in _declared(body)] or None,
        "tool_choice": _tool_choice(body.get("tool_choice")),
        "response_format": _response_format(fields.mapping(fields.mapping(body, "text"), "format")),
        "max_tokens": body.get("max_output_tokens"),
        **{name: body.get(name) for name in ("temperature", "top_p", "parallel_tool_calls")},
    }
    return ChatForm(
        body={name: value for name, value in chat.items() if value is not None},
        notes={_INSTRUCTED: "1"} if instructions else {},
    )


def _previous_messages(uid: Any, known: CallSequences) -> list[Mapping[str, Any]]:
    """Return the conversation up to the end of a response, without its instructions."""
    if uid is None:
        return []
    sequence = known.by_uid.get(uid) if isinstance(uid, str) else None
    if sequence is None or not uid.startswith(PREFIX):
        raise BadRequest(
            f"this session has no response {fields.shown(uid)}; previous_response_id continues a response of the same "
            "session while it is open: send the whole conversation as input instead",
            "previous_response_id",
            code="previous_response_not_found",
        )
    (message,) = answered_messages(sequence.call)
    answer = {name: value for name, value in message.items() if value is not None}
    return [*sequence.messages[_INSTRUCTED in sequence.call.sampling :], answer]


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the input as messages; reasoning, text and calls of one answer are one message."""
    if isinstance(body.get("input"), str):
        return [{"role": "user", "content": body["input"]}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(objects(body, "input")):
        place = f"input[{number}]"
        kind = item.get("type", "message")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise BadRequest(f"{place}.role must be one of {', '.join(_ROLES)}", f"{place}.role")
            content = text_of(item.get("content"), f"{place}.content", _TEXTS)
            if role == "assistant" and last is not None and last.keys() == {"role", "reasoning_content"}:
                last["content"] = content
            else:
                messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            if reasoning := text_of(item.get("content"), f"{place}.content", ("reasoning_text",)):
                messages.append({"role": "assistant", "reasoning_content": reasoning})
        elif kind == "function_call":
            name = _full_name(item.get("namespace"), item.get("name"))
            call = call_of(name, item.get("arguments"), item.get("call_id"), place)
            if last is None:
                messages.append(last := {"role": "assistant", "content": None})
            last.setdefault("content", None)
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = text_of(item.get("output"), f"{place}.output", _TEXTS)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise unsupported(place, kind, _ITEMS)
    if not messages:
        raise BadRequest("input must be a text or a list of at least one item", "input")
    return messages


def _declared(body: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Any, str]]:
    """Yield each tool of a request except searches, its namespace or None, and its place."""
    for number, tool in enumerate(objects(body, "tools")):
        place = f"tools[{number}]"
        if tool.get("type") == "namespace":
            check_names(tool, {"type", "name", "description", "tools"}, {}, set())
            for inner, member in enumerate(objects(tool, "tools")):
                yield member, tool.get("name"), f"{place}.tools[{inner}]"
        elif tool.get("type") not in _SEARCHES:
            yield tool, None, place


def _tool(tool: Mapping[str, Any], namespace: Any, place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(place, tool.get("type"), ("function", "namespace"))
    check_names(tool, {"type", "name", "description", "parameters"}, {"defer_loading": (False,)}, {"strict"})
    return function_tool({**tool, "name": _full_name(namespace, tool.get("name"))}, "parameters", place)


def _full_name(namespace: Any, name: Any) -> Any:
    """Return the name by which the model calls a function of a namespace, if it has one: chats have no namespaces."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and isinstance(name, str) else name


def _response_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type", "text")
    if kind == "json_schema":
        names = ("name", "description", "schema", "strict")
        return {"type": kind, kind: {name: form[name] for name in names if form.get(name) is not None}}
    if kind not in ("text", "json_object"):
        raise unsupported("text.format", kind, ("text", "json_object", "json_schema"))
    return {"type": kind} if kind != "text" else None


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice", choice.get("type"), ("auto", "none", "required", "function"))
    return {"type": "function", "function": {"name": choice.get("name")}}


class ResponseStream(AnswerStream):
    """The events of a response, and the response."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__(request)
        self._events = 0
        self._spaces = {
            _full_name(space, tool.get("name")): {"name": tool.get("name"), "namespace": space}
            for tool, space, _place in _declared(request)
            if space is not None
        }
        """Name and namespace of the functions that have one, by the name that the model calls."""

    def _event(self, kind: str, **more: Any) -> Event:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **more}

    def begin(self) -> Iterator[Event]:
        """Yield that the response is created and in progress."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def begin_block(self, block: Block) -> Iterator[Event]:
        """Yield the beginning of an item and of its only part."""
        item = self._item(block, "in_progress")
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **_place(item, block), part=_part(block))

    def grow_block(self, block: Block, text: str) -> Iterator[Event]:
        """Yield new text or arguments."""
        item = self._item(block, "in_progress")
        more: Event = {"logprobs": []} if block.kind == "text" else {}
        yield self._event(f"response.{_DELTAS[block.kind]}.delta", **_place(item, block), delta=text, **more)

    def end_block(self, block: Block) -> Iterator[Event]:
        """Yield the whole text or arguments, and the end of the item."""
        item = self._item(block, self._status())
        name = f"response.{_DELTAS[block.kind]}.done"
        if block.kind == "call":
            yield self._event(name, **_place(item, block), name=item["name"], arguments=block.text)
        else:
            more: Event = {"logprobs": []} if block.kind == "text" else {}
            yield self._event(name, **_place(item, block), text=block.text, **more)
            yield self._event("response.content_part.done", **_place(item, block), part=_part(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def end(self) -> Iterator[Event]:
        """Yield the whole response."""
        yield self._event(f"response.{self._status()}", response=self.answer())

    def answer(self) -> dict[str, Any]:
        """Return the response."""
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self.finish_reason in _INCOMPLETE else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Return an item of the output; ids are those of the call, so that a repeated answer has the same."""
        name = f"{str(self.head.get('id')).removeprefix(PREFIX)}_{block.index}"
        content = [] if status == "in_progress" else [_part(block)]
        match block.kind:
            case "reasoning":
                return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": status}
            case "text":
                message = {"role": "assistant", "content": content, "status": status}
                return {"type": "message", "id": f"msg_{name}", **message}
            case "call":
                call = {"call_id": block.identifier, "arguments": block.text, "status": status}
                names = self._spaces.get(block.name, {"name": block.name})
                return {"type": "function_call", "id": f"fc_{name}", **names, **call}

    def _response(self, status: str) -> dict[str, Any]:
        request, head, usage = self.request, self.head, self.usage
        done = status != "in_progress"
        reason = {"reason": _INCOMPLETE[self.finish_reason]} if status == "incomplete" else None
        # Temperature and top_p are the run's, and an answer does not say them.
        return {
            "id": head.get("id"),
            "object": "response",
            "created_at": head.get("created", 0),
            "model": head.get("model"),
            "policy_version": self.policy_version if done else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "output": [self._item(block, status) for block in self.blocks] if done else [],
            "usage": _usage(usage) if done and usage else None,
            "temperature": None,
            "top_p": None,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}, **(request.get("text") or {})},
            **{name: default if request.get(name) is None else request[name] for name, default in _ECHOED.items()},
        }


_DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHOED: Mapping[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "reasoning": None, "store": True, "tool_choice": "auto", "tools": [], "user": None,
}  # fmt: skip


def _place(item: Mapping[str, Any], block: Block) -> dict[str, Any]:
    place = {"item_id": item["id"], "output_index": block.index}
    return place if block.kind == "call" else {**place, "content_index": 0}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    read, sampled = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoned = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": read + sampled,
    }


def stream_error(error: Mapping[str, Any], number: int) -> Event:
    """Return OpenAI's error as the last event of a stream, event `number`; clients raise the error inside."""
    names = {name: error.get(name) for name in ("code", "message", "param")}
    return {"type": "error", **names, "sequence_number": number, "error": dict(error)}
