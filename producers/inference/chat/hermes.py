"""Tool calls as text, in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call that is not valid JSON stays in the text, so that an environment can respond to it.
"""

import json
import math
import re
from typing import Any

from rollstream.producers.inference.chat.template import AssistantMessage, ToolCall
from rollstream.producers.json_text import readable

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_OF_THINK = "<think>", "</think>"
_BLOCK = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


def parse(text: str, *, complete: bool = True) -> AssistantMessage:
    """Split a text into content and tool calls.

    If the text is not `complete`, everything from the first unclosed call on is left out.
    """
    content: list[str] = []
    calls: list[ToolCall] = []
    end = 0
    for block in _BLOCK.finditer(text):
        content.append(text[end : block.start()])
        end = block.end()
        call = _call(block[1])
        if call is None:
            content.append(block[0])
        else:
            calls.append(call)
    rest = text[end:]
    content.append(rest if complete else rest.partition(OPEN)[0])
    joined = "".join(content)
    # Models write line breaks around calls; they are not content.
    return AssistantMessage(content="" if calls and not joined.strip() else joined, tool_calls=tuple(calls))


def parse_with_reasoning(text: str, *, opened: bool, complete: bool = True) -> AssistantMessage:
    """Split a text into the reasoning at its start, the content and the tool calls.

    `opened` is true if the prompt already ends with the tag that begins the reasoning.
    """
    begins = text.lstrip().startswith(THINK)
    if not opened and not begins:
        return parse(text, complete=complete)
    reasoning, end, rest = (text.partition(THINK)[2] if begins else text).partition(END_OF_THINK)
    message = parse(rest.lstrip("\n"), complete=complete)
    return AssistantMessage(
        content=message.content,
        reasoning=reasoning.strip("\n") if end or complete else reasoning.lstrip("\n").rstrip(),
        tool_calls=message.tool_calls,
    )


def call_text(name: str, arguments: str) -> str:
    """Return a call as text."""
    return f'{OPEN}{{"name": {readable(name)}, "arguments": {arguments}}}{CLOSE}'


def _call(text: str) -> ToolCall | None:
    try:
        call: Any = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], readable(arguments))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """Return a number; one beyond float64 would be written as Infinity, which is no JSON."""
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is beyond float64")
    return number
