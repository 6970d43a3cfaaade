"""A judge over HTTP: what it is asked, how its answers are read, and what happens to unreadable answers."""

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.labeling.config import JudgeConfig
from rollstream.consumers.labeling.judge import Judge, JudgeUnavailable, RateLimit, judge_prompt, parse_score
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.heartbeats import HEARTBEATS
from rollstream.topics.records import Rollout, Turn
from tests.support.producing import serving_http
from tests.support.runs import rollout
from tests.support.virtual_time import VirtualClock

TURNS = (
    Turn(role="system", text="Be short.", start=0, stop=1),
    Turn(role="user", text="What is {response}?", start=1, stop=3),
    Turn(role="assistant", text="A {prompt}.", start=3, stop=6),
)
JUDGED = rollout("q", 1, turns=TURNS)


def test_a_template_gets_the_texts_of_the_turns_and_texts_are_no_templates() -> None:
    assert judge_prompt("Q: {prompt} A: {response} {other}", JUDGED) == (
        "Q: Be short.\nWhat is {response}? A: A {prompt}. {other}"
    )
    assert judge_prompt("{conversation}", JUDGED).splitlines()[1] == "user: What is {response}?"
    with pytest.raises(RecordError, match="no turn of the assistant"):
        judge_prompt("{prompt}", replace(JUDGED, turns=TURNS[:2]))


@pytest.mark.parametrize(
    ("text", "reward"), [("Score: 7", 0.7), ("Score: 3, no.\nscore: 10", 1.0), ("Score:0", 0.0), ("Score: 2.5.", 0.25)]
)
def test_the_last_score_counts_and_becomes_a_reward_between_0_and_1(text: str, reward: float) -> None:
    assert parse_score(text, JudgeConfig()) == reward


@pytest.mark.parametrize(
    "text", ["", "I cannot say.", "Score: ten", "Score: 11", "Score: -1", "7", "Score: " + "9" * 400]
)
def test_an_answer_without_a_valid_score_is_refused_and_never_0(text: str) -> None:
    with pytest.raises(RecordError, match=r"score"):
        parse_score(text, JudgeConfig())


@given(st.text())
def test_any_answer_is_a_reward_between_0_and_1_or_refused(text: str) -> None:
    with contextlib.suppress(RecordError):
        assert 0 <= parse_score(text, JudgeConfig()) <= 1


@pytest.mark.parametrize(
    "changes", [{"score_pattern": "("}, {"score_pattern": "7"}, {"lowest": 10.0}, {"concurrency": 0}]
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"labeling\.judge"):
        JudgeConfig(**changes)
    with pytest.raises(ConfigurationError, match="ends in /v1"):
        Judge(JudgeConfig())


def test_calls_are_spaced_by_the_rate() -> None:
    now = [0.0]
    rate = RateLimit(10.0, lambda: now[0])
    assert [round(rate.pause_s(), 6) for _ in range(3)] == [0.0, 0.1, 0.2]
    now[0] = 5.0
    assert rate.pause_s() == 0.0
    assert RateLimit(0.0, lambda: now[0]).pause_s() == 0.0


Handler = Callable[[web.Request], Coroutine[Any, Any, web.Response]]


def answer(text: object) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


async def is_short(request: web.Request) -> bool:
    """Whether this is the question that a judge answers unless it fails at all of them."""
    return "Hello" in (await request.json())["messages"][0]["content"]


def ask(handler: Handler, rollouts: list[Rollout], **settings: Any) -> list[Any]:
    async def judged() -> list[Any]:
        judge = Judge(JudgeConfig(url=url, **settings))
        try:
            return await asyncio.gather(*map(judge, rollouts), return_exceptions=True)
        finally:
            await judge.close()

    with serving_http(handler) as url:
        return asyncio.run(judged())


def test_calls_run_together_within_their_limit_and_what_may_pass_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    seen: list[dict[str, Any]] = []
    now = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal now, most
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.path == "/v1/chat/completions"
        now += 1
        most = max(most, now)
        while most < 2:  # the first request waits for a second
            await asyncio.sleep(0.01)
        now -= 1
        seen.append(await request.json())
        if len(seen) <= 3:
            return web.Response(status=(503, 429, 500)[len(seen) - 1], headers={"Retry-After": "0"})
        example = re.findall(r"example (\d)", seen[-1]["messages"][0]["content"])[0]
        return answer(f"Fine. Score: {example}")

    rollouts = [rollout(str(n), turns=(replace(TURNS[1], text=f"example {n}"), TURNS[2])) for n in range(8)]
    labels = ask(handler, rollouts, concurrency=3, api_key="env:JUDGE_KEY", model="m")
    assert [label.reward for label in labels] == [n / 10 for n in range(8)]
    assert len(seen) == 8 + 3
    assert 1 < most <= 3
    assert {(body["model"], body["temperature"]) for body in seen} == {("m", 0.0)}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (lambda: answer("no idea"), "has no score"),
        (lambda: answer(None), "without a text"),
        (lambda: web.json_response({"choices": []}), "not OpenAI's chat completions"),
        (lambda: web.json_response({"error": "too long"}, status=400), "refused the rollout: it answered 400"),
    ],
)
def test_a_rollout_that_gets_no_score_is_refused_with_the_reason(
    response: Callable[[], web.Response], reason: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return answer("Hi") if await is_short(request) else response()

    [failure] = ask(handler, [JUDGED])
    assert isinstance(failure, RecordError)
    assert reason in str(failure)


@pytest.mark.parametrize(
    ("status", "patience_s", "reason"),
    [
        (401, 60.0, "refuses every request"),
        (400, 60.0, r"refuses every request: it answered 400.*; check model, template"),
        (503, 0.5, r"did not answer within 0\.5 s"),
    ],
)
def test_a_judge_that_answers_nobody_ends_labeling_and_refuses_no_rollout(
    status: int, patience_s: float, reason: str
) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=json.dumps({"error": "no"}))

    [failure] = ask(handler, [JUDGED], patience_s=patience_s)
    assert isinstance(failure, JudgeUnavailable)
    assert re.search(reason, str(failure))


def test_a_refusal_is_judged_by_a_question_with_the_same_template_and_parameters_once_the_judge_has_room() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if not await is_short(request):
            return web.Response(status=422)
        return web.Response(status=503) if len(seen) == 2 else answer("Hi")

    [refusal] = ask(handler, [JUDGED], template="Rate {response}", temperature=0.5)
    assert isinstance(refusal, RecordError)
    assert "refused the rollout" in str(refusal)
    assert [body.pop("messages")[0]["content"] for body in seen] == ["Rate A {prompt}.", "Rate Hello"] * 2
    assert seen == [seen[0]] * 4


def test_parameters_that_a_model_refuses_can_be_left_out() -> None:
    async def handler(request: web.Request) -> web.Response:
        refused = {"temperature", "max_tokens"} & (await request.json()).keys()
        return web.Response(status=400) if refused else answer("Score: 7")

    [label] = ask(handler, [JUDGED], temperature=-1.0, max_tokens=0)
    assert label.reward == 0.7


@pytest.mark.parametrize("failure", ["500", "no answer", "no JSON"])
def test_a_rollout_at_which_a_judge_fails_that_answers_others_is_refused_alone(failure: str) -> None:
    """Otherwise labeling would end at it at every start, and label nothing after it."""

    async def handler(request: web.Request) -> web.Response:
        if await is_short(request):
            return answer("Hi")
        if failure == "no answer":
            await asyncio.Event().wait()
        return web.Response(status=500 if failure == "500" else 200, text="<html>")

    [refusal] = ask(handler, [JUDGED], patience_s=0.5, timeout_s=3.0)
    assert isinstance(refusal, RecordError)
    assert "failed at this rollout for 0.5 s" in str(refusal)


def test_a_judge_without_room_refuses_no_rollout() -> None:
    async def handler(request: web.Request) -> web.Response:
        return answer("Hi") if await is_short(request) else web.Response(status=429)

    [failure] = ask(handler, [JUDGED], patience_s=0.5)
    assert isinstance(failure, JudgeUnavailable)


Script = Callable[[str], Coroutine[Any, Any, tuple[int, str]]]
"""Returns the status and the text of the answer to a prompt."""


class ScriptedCall:
    """A call of a judge that has no network: its answer comes from a coroutine."""

    def __init__(self, handler: Script, body: dict[str, Any]) -> None:
        self._handler, self._prompt = handler, body["messages"][0]["content"]
        self.headers = {"Retry-After": "30"}

    async def __aenter__(self) -> "ScriptedCall":
        self.status, self._text = await self._handler(self._prompt)
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass

    async def text(self) -> str:
        return self._text

    async def json(self, content_type: str | None) -> Any:
        return {"choices": [{"message": {"content": self._text}}]}


def on_a_virtual_clock(
    monkeypatch: pytest.MonkeyPatch,
    handler: Script,
    rollouts: list[Rollout],
    config: JudgeConfig,
) -> tuple[list[Any], float, float]:
    """Return the labels or errors of rollouts, the seconds that passed, and the most that the judge allows for them."""

    class Session:
        def __init__(self, **_settings: Any) -> None:
            pass

        def post(self, _url: str, *, json: dict[str, Any]) -> ScriptedCall:
            return ScriptedCall(handler, json)

        async def close(self) -> None:
            pass

    clock = VirtualClock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(aiohttp, "ClientSession", Session)
    monkeypatch.setattr(aiohttp, "TCPConnector", lambda **_settings: None)

    async def judged() -> tuple[list[Any], float]:
        judge = Judge(config)
        return await asyncio.gather(*map(judge, rollouts), return_exceptions=True), judge.longest_s(len(rollouts))

    labels, longest_s = clock.run(judged())
    return labels, clock.now_s, longest_s


def test_calls_are_repeated_after_the_time_that_a_judge_without_room_names(monkeypatch: pytest.MonkeyPatch) -> None:
    called_s: list[float] = []

    async def full(_prompt: str) -> tuple[int, str]:
        called_s.append(time.monotonic())
        return (429, "") if len(called_s) <= 3 else (200, "Score: 7")

    config = JudgeConfig(url="http://judge/v1")
    labels, passed_s, _longest_s = on_a_virtual_clock(monkeypatch, full, [JUDGED], config)
    assert [label.reward for label in labels] == [0.7]
    pauses_s = [after - before for before, after in itertools.pairwise(called_s)]
    assert all(30 < pause_s < 31 for pause_s in pauses_s), pauses_s
    assert passed_s < 93
    called_s.clear()
    labels, passed_s, _longest_s = on_a_virtual_clock(monkeypatch, full, [JUDGED], replace(config, patience_s=20.0))
    assert [type(label) for label in labels] == [JudgeUnavailable]
    assert (len(called_s), round(passed_s)) == (1, 20)


@pytest.mark.parametrize(
    "settings", [{}, {"requests_per_s": 0.25}, {"concurrency": 3, "patience_s": 10.0, "timeout_s": 5.0}]
)
def test_no_poll_takes_longer_than_the_judge_says(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Otherwise the group would expel the process, which would ask the judge about the same rollouts for ever."""
    ages_s: list[float] = []

    async def slow(prompt: str) -> tuple[int, str]:
        ages_s.append(HEARTBEATS.ages["labeling"])
        await asyncio.sleep(59.9 if "Hello" in prompt else 3600.0)
        return 200, "Hi"

    config = JudgeConfig(url="http://judge/v1", **settings)
    labels, passed_s, longest_s = on_a_virtual_clock(monkeypatch, slow, [JUDGED] * 16, config)
    assert {type(label) for label in labels} <= {RecordError, JudgeUnavailable}
    assert config.patience_s < passed_s < longest_s
    assert max(ages_s) < 2, "a probe of the process sees that it is alive"
