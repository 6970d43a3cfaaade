"""A conversation with a policy that calls tools, over OpenAI's protocol: the loop that agents with tools share.

It knows an address, a key and a model, and nothing of tokens, groups or versions.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollstream.producers.environments.environment import Endpoint
from rollstream.topics.errors import RollstreamError

if TYPE_CHECKING:
    import aiohttp

_UNREADABLE = re.compile(r"[^ -~\n]")


class PolicyUnreachable(RollstreamError):
    """The policy's address answered neither with a message nor with a refusal because of length."""


async def converse(
    endpoint: Endpoint,
    question: str,
    answer_call: Callable[[str, str], Awaitable[str]],
    *,
    turns: int,
    tools: Sequence[Mapping[str, Any]],
    **sampling: Any,
) -> str:
    """Ask a question, and answer calls by `answer_call(tool, arguments)` until the policy replies without one.

    Returns that reply; empty if the conversation became too long for the policy, or it had no turns left. Raises
    PolicyUnreachable if the address gives no answer.
    """
    import aiohttp  # Imported here, because a learner loads environments, too, and aiohttp reads all certificates.

    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as session:
        for _ in range(turns):
            body = {"model": endpoint.model, "messages": messages, "tools": tools, **sampling}
            message = await _ask(session, endpoint.base_url, body)
            if message is None:
                break
            messages.append(message)
            calls = message.get("tool_calls") or ()
            if not calls:
                return str(message.get("content") or "").strip()
            for call in calls:
                result = await answer_call(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return ""


async def _ask(session: "aiohttp.ClientSession", base_url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the policy's message; None if the conversation has become too long for the policy."""
    import aiohttp

    try:
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            text = await response.text()
    except aiohttp.ClientError as error:
        raise PolicyUnreachable(f"{base_url} did not answer: {error!r}") from error
    if response.status == 400 and "context" in text:
        return None
    if response.status != 200:
        raise PolicyUnreachable(f"{base_url} answered {response.status}: {text[:200]}")
    message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
    return {name: value for name, value in message.items() if name in ("role", "content", "tool_calls") and value}


def name_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without its parameters, which are optional in OpenAI's protocol."""
    return {"type": tool["type"], "function": {"name": tool["function"]["name"]}}


def text_argument(arguments: Any, name: str) -> str:
    """Return an argument of a call. Raises ValueError if it is no text."""
    value = arguments.get(name) if isinstance(arguments, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"the argument {name} must be a text")
    return value


def printable(text: str) -> str:
    """Replace each character that is not printable ASCII by `?`.

    An answer may quote the policy, and the policy's tokenizer may not be able to encode the character.
    """
    return _UNREADABLE.sub("?", text)
