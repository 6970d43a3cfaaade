"""Tool use: what the tools answer, and how an episode is scored against an address that speaks OpenAI's protocol."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.environments.chat import PolicyUnreachable
from rollstream.producers.environments.environment import Endpoint, Prompt, Score
from rollstream.producers.tasks.tool_use import ToolUse
from rollstream.topics.errors import ConfigurationError
from tests.support.producing import serving_http
from tests.support.scripted_endpoint import call as call_of
from tests.support.scripted_endpoint import play

BOTH = ToolUse(kinds=("calculator", "database"))


def calc(expression: str) -> str:
    return BOTH.result_of("calc", json.dumps({"e": expression}))


def sql(query: str) -> str:
    return BOTH.result_of("sql", json.dumps({"q": query}))


@pytest.mark.parametrize(
    ("expression", "value"), [("17+25", "42"), ("2*-3", "-6"), ("1-2-3", "-4"), ("(1+2)*3", "9"), ("7", "7")]
)
def test_the_calculator_knows_sums_differences_and_products(expression: str, value: str) -> None:
    assert calc(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "1+", "2**9", "__import__('os')", "1.5", "'a'*9", "True", "[1]", "((((" * 40]
)
def test_the_calculator_answers_everything_else_with_an_error(expression: str) -> None:
    assert calc(expression).startswith("error")


def test_the_database_answers_queries_and_nothing_changes_it() -> None:
    assert sql("select count(*) from goods") == "10"
    price = sql("select price from goods where name='kiwi'")
    assert price.isdigit()
    for attempt in ("delete from goods", "attach 'x' as y", "create table t (a)", "pragma query_only=off", "nonsense"):
        assert sql(attempt).startswith("error"), attempt
    assert sql("select price from goods where name='kiwi'") == price


def test_a_query_without_an_end_is_stopped() -> None:
    endless = "with recursive n(x) as (select 1 union all select x+1 from n) select count(*) from n"
    assert sql(endless).startswith("error")


@given(st.sampled_from(["calc", "sql", "rm"]), st.text() | st.just("[]") | st.just('{"e": 1}') | st.just('{"q": null}'))
def test_a_tool_answers_any_call(tool: str, arguments: str) -> None:
    answer = BOTH.result_of(tool, arguments).replace("\n", "")
    assert answer.isascii()
    assert answer.isprintable()


def test_an_answer_quotes_only_what_the_policy_can_read() -> None:
    assert calc("1+\ufffd").startswith("error: invalid character '?'")
    assert sql("select char(7) || 'x'") == "?x"


def test_a_small_instance_has_small_numbers_and_tells_the_names_of_its_tools() -> None:
    small = ToolUse(operands=(1, 4), described=False)
    prompts = [*small.prompts("train"), *small.prompts("heldout")]
    assert sorted(prompt.text for prompt in prompts) == [f"{a}+{b}=" for a in range(1, 5) for b in range(1, 5)]
    assert [dict(tool) for tool in small.warm_start_conversations(0, 1)[0].tools] == [
        {"type": "function", "function": {"name": "calc"}}
    ]


@pytest.mark.parametrize("demonstrated", [0.0, 0.5, 1.0])
def test_the_share_that_is_demonstrated_is_right_and_the_rest_by_chance(demonstrated: float) -> None:
    conversations = ToolUse(demonstrated=demonstrated).warm_start_conversations(3, 400)
    right = 0
    for conversation in conversations:
        question = conversation.messages[0]["content"]
        a, b = map(int, question.removesuffix("=").split("+"))
        right += conversation.turn == str(a + b) or f'"{a}+{b}"' in conversation.turn
    # By chance one in two hundred sums is right.
    assert demonstrated * 400 - 40 < right < demonstrated * 400 + 45


def played(question: str, *answers: Any, **options: Any) -> Score:
    """Play one question against a server that gives these messages, or statuses and texts, in turn."""
    environment = ToolUse(kinds=("calculator", "database"), **options)
    prompts = {p.text: p for split in ("train", "heldout") for p in environment.prompts(split)}  # type: ignore[arg-type]
    return play(environment, prompts[question], *answers)[0]


def call(expression: str) -> dict[str, Any]:
    return call_of("calc", e=expression)


def test_the_right_call_and_the_right_answer_each_earn_half() -> None:
    assert played("17+25=", call("17+25"), {"content": "42"}).reward == 1.0
    assert played("17+25=", call("17+25"), {"content": "43"}).reward == 0.5
    assert played("17+25=", {"content": "42"}).reward == 0.5
    assert played("17+25=", call("17+26"), {"content": "43"}).reward == 0.0


def test_an_episode_ends_with_its_turns_and_with_the_length_of_the_model() -> None:
    assert played("17+25=", call("17+25"), call("17+25"), turns=2).components == {"exact": 0.0, "helped": 1.0}
    too_long = (400, '{"error": {"code": "context_length_exceeded"}}')
    assert played("17+25=", call("17+25"), too_long).components == {"exact": 0.0, "helped": 1.0}


def test_a_policy_that_cannot_be_reached_is_a_failure_and_no_reward() -> None:
    with pytest.raises(PolicyUnreachable, match="503"):
        played("17+25=", (503, "later"))


def test_an_episode_in_responses_continues_each_response() -> None:
    environment = ToolUse(dialect="responses", max_tokens=50)
    called = {"type": "function_call", "call_id": "c1", "name": "calc", "arguments": '{"e": "17+25"}'}
    said = {"type": "message", "content": [{"type": "output_text", "text": text} for text in ("4", "2")]}
    script = iter([("completed", [called]), ("completed", [said])])
    requests = []

    async def answer(request: web.Request) -> web.Response:
        requests.append((request.path, await request.json()))
        status, output = next(script)
        return web.json_response({"id": f"resp_{len(requests)}", "status": status, "output": output})

    with serving_http(answer) as url:
        endpoint = Endpoint(base_url=url, api_key="key", model="policy")
        prompt = Prompt(example_id="p", text="17+25=", answer="42")
        score = asyncio.run(environment.play(prompt, endpoint))
    assert score.reward == 1.0
    assert [path for path, _body in requests] == ["/v1/responses"] * 2
    first, second = (body for _path, body in requests)
    assert first["input"] == [{"role": "user", "content": "17+25="}]
    assert (first["previous_response_id"], second["previous_response_id"]) == (None, "resp_1")
    assert second["input"] == [{"type": "function_call_output", "call_id": "c1", "output": "42"}]
    assert [(tool["type"], tool["name"]) for tool in second["tools"]] == [("function", "calc")]
    assert (second["max_output_tokens"], second["temperature"], second["model"]) == (50, 1.0, "policy")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dialect": "morse"}, "dialect morse; use chat or responses"),
        ({"kinds": ("abacus",)}, "abacus"),
        ({"operands": (5, 5)}, "operands"),
        ({"operands": (-1, 5)}, "operands"),
        ({"demonstrated": 1.5}, "demonstrated"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ToolUse(**options)


def test_a_query_cannot_make_a_large_text() -> None:
    assert sql("select length(printf('%.500000000c', 'x'))") == "None"
    assert sql("select hex(zeroblob(100000000))").startswith("error")
    assert sql("select printf('%.100c', 'x')") == "x" * 100
