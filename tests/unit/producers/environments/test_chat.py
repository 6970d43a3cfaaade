"""Environments of messages: functions as tools, conversations until an answer, and what goes over the wire."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from rollstream.producers.environments.chat import Chat, ChatEnvironment, Tool, tool_of
from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.environments.scripted_policy import ScriptedPolicy
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.media import image_part
from tests.support.scripted_endpoint import call, play

PROMPT = Prompt(example_id="x", text="1+2?", answer="3")


@dataclass
class Place:
    city: str


def weather(place: Place, unit: Literal["c", "f"] = "c", days: list[int] | None = None) -> dict[str, Any]:
    """Look up the weather
    of a place.

    It never rains.

    Args:
        place: Where,
            town: nowhere else.
        unit (optional): Degrees: of Celsius or Fahrenheit.

    Returns:
        temperature: Degrees.
    """
    return {"city": place.city, "unit": unit, "days": days}


async def fail(a: int) -> str:
    raise ValueError(f"{a} is no good")


def test_a_function_is_described_by_its_hints_and_its_docstring() -> None:
    function = tool_of(weather).schema["function"]
    assert (function["name"], function["description"]) == (
        "weather",
        "Look up the weather of a place. It never rains.",
    )
    parameters = function["parameters"]
    assert parameters["required"] == ["place"]
    assert parameters["properties"]["unit"] == {
        "description": "Degrees: of Celsius or Fahrenheit.",
        "enum": ["c", "f"],
        "default": "c",
    }
    assert parameters["properties"]["place"]["description"] == "Where, town: nowhere else."
    assert parameters["$defs"]["Place"]["required"] == ["city"]
    assert "description" not in parameters["properties"]["days"]


@pytest.mark.parametrize(
    ("function", "arguments", "answer"),
    [
        (weather, '{"place": {"city": "Rome"}}', '{"city": "Rome", "unit": "c", "days": null}'),
        (weather, '{"place": {"city": "Köln"}, "days": [1]}', '{"city": "Köln", "unit": "c", "days": [1]}'),
        (weather, '{"place": "Rome"}', "error: Expected `object`, got `str` - at `$.place`"),
        (weather, '{"place": {"city": "Rome"}, "unit": "k"}', "error: Invalid enum value 'k' - at `$.unit`"),
        (weather, '{"town": 1}', "error: Object contains unknown field `town`"),
        (weather, "Rome", "error: JSON is malformed"),
        (fail, '{"a": 7}', "error: ValueError('7 is no good')"),
        (lambda: "now", "", "now"),
    ],
)
def test_a_call_is_answered_and_what_is_wrong_with_it_is_an_answer_too(
    function: Any, arguments: str, answer: str
) -> None:
    assert asyncio.run(tool_of(function).answer(arguments)).startswith(answer)


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    pass


def uncertain(a: "Nothing") -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


def imaginary(a: complex) -> None:
    pass


def endless(*a: int) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (untyped, "the function untyped cannot be a tool: the parameter a has no type hint"),
        (uncertain, "the function uncertain cannot be a tool: name 'Nothing' is not defined"),
        (imaginary, "the function imaginary cannot be a tool: Generating JSON schema"),
        (endless, "the function endless cannot be a tool: the parameter"),
    ],
)
def test_a_function_whose_arguments_json_cannot_express_is_refused_by_name(function: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        tool_of(function)


class Sums(ChatEnvironment):
    name, max_tokens, turns, system = "sums", 8, 3, ""

    def __init__(self) -> None:
        self.added: list[tuple[int, int]] = []

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [PROMPT]

    def tools_for(self, prompt: Prompt) -> Sequence[Any]:
        def add(a: int, b: int) -> int:
            """Add."""
            self.added.append((a, b))
            return a + b

        return [add]

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        return Score(reward=float(response_text == prompt.answer), components={"truncated": float(truncated)})


ADD: Mapping[str, Any] = {"add": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("replies", "reward", "texts"),
    [
        (("3",), 1.0, ["1+2?"]),
        ((ADD, "3"), 1.0, ["1+2?", "3"]),
        ((ADD, ADD, "3"), 1.0, ["1+2?", "3", "3"]),
        ((ADD, ADD, ADD), 0.0, ["1+2?", "3", "3"]),
        (({**ADD, "subtract": {}}, "3"), 1.0, ["1+2?", "error: there is no tool subtract"]),
        (("",), 0.0, ["1+2?"]),
    ],
)
def test_calls_are_answered_until_a_reply_has_none_or_the_turns_are_used_up(
    replies: tuple[Any, ...], reward: float, texts: list[str]
) -> None:
    policy = ScriptedPolicy(*replies)
    assert asyncio.run(Sums().converse(PROMPT, policy.ask)).reward == reward
    assert policy.texts == texts


def test_a_reply_that_was_cut_off_ends_the_conversation_and_its_calls_are_not_run() -> None:
    sums, policy = Sums(), ScriptedPolicy(ADD, "3", truncated=True)
    assert asyncio.run(sums.converse(PROMPT, policy.ask)).components == {"truncated": 1.0}
    cut = ScriptedPolicy(ADD, truncated=True)
    asyncio.run(sums.converse(PROMPT, cut.ask))
    assert sums.added == [(1, 2)]


def test_a_conversation_holds_the_system_all_messages_and_each_call_with_its_answer() -> None:
    chat = Chat(ScriptedPolicy({"add": {"a": 1, "b": 2}, "no": {}}, "3").ask, Sums().tools_for(PROMPT), "Add.")
    example = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"})
    asyncio.run(chat.until_answer(*example, "1+2?", turns=2))
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "tool", "assistant"]
    calls = chat.messages[4]["tool_calls"]
    assert "content" not in chat.messages[4]
    assert [each["tool_call_id"] for each in chat.messages[5:7]] == [each["id"] for each in calls]
    assert calls[0]["id"] != calls[1]["id"]


def test_an_environment_of_messages_plays_at_an_endpoint_with_its_tools_and_its_limit() -> None:
    score, requests = play(Sums(), PROMPT, call("add", a=1, b=2), {"content": "3"})  # type: ignore[arg-type]
    assert score.reward == 1.0
    assert [request["max_tokens"] for request in requests] == [8, 8]
    assert requests[0]["tools"][0]["function"]["name"] == "add"
    assert requests[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "add"
    assert requests[1]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "3"}


@pytest.mark.parametrize("status", [400, 500])
def test_a_conversation_that_is_too_long_is_truncated_and_any_other_refusal_is_an_error(status: int) -> None:
    refusal = (status, json.dumps({"error": {"code": "context_length_exceeded"}}))
    if status == 400:
        score, requests = play(Sums(), PROMPT, call("add", a=1, b=2), refusal)  # type: ignore[arg-type]
        assert (score.reward, score.components["truncated"], len(requests)) == (0.0, 1.0, 2)
    else:
        with pytest.raises(Exception, match="answered 500"):
            play(Sums(), PROMPT, refusal)


def test_a_tool_may_have_a_description_of_its_own() -> None:
    async def answer(arguments: str) -> str:
        return arguments

    tool = Tool(schema={"type": "function", "function": {"name": "echo"}}, answer=answer)
    policy = ScriptedPolicy({"echo": {"a": 1}}, "done")
    asyncio.run(Chat(policy.ask, [tool]).until_answer("go", turns=2))
    assert policy.texts == ["go", '{"a": 1}']


def test_an_image_in_bytes_is_sent_as_data() -> None:
    policy = ScriptedPolicy("two")
    chat = Chat(policy.ask)
    content = [{"type": "image", "image": b"\xff\xd8\xff"}, {"type": "text", "text": "How many dots?"}]
    assert asyncio.run(chat({"role": "user", "content": content})).text == "two"
    assert chat.messages[0] == {"role": "user", "content": [image_part("image/jpeg", b"\xff\xd8\xff"), content[1]]}
