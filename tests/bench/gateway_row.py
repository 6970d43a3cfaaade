"""Row `gateway`: a model call through a gateway in a separate process, against the same call without a gateway.

The inference server answers at once with 16 tokens, and each prompt adds 64 tokens to the previous prompt and answer.
So the row measures only the gateway: its HTTP, its log, and the record that it waits for. Client and server share this
process.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import psutil
from aiohttp import web

from tests.bench.measure import LatencyRow, Settings, percentile
from tests.bench.runs import prepared
from tests.support.agents import supervised_gateway
from tests.support.gateways import GatewayUnderTest, gateway
from tests.support.producing import serving_http

_CALLS_OF_A_SESSION = 10
_ADDED, _SAMPLED = 64, 16
_AT_ONCE = 16
"""Sessions that make calls at the same time when calls per second are measured."""
Turns = list[tuple[str, str]]
"""Role and text of each turn; the text of a user is a number."""


class _Dialect(NamedTuple):
    """How a client of a dialect asks and reads."""

    path: str
    body: Callable[[Turns], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


def _messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def _tokens(turns: Turns) -> list[int]:
    """64 tokens of each question, and 16 of each answer."""
    ids: list[int] = []
    for role, text in turns:
        ids += range(_SAMPLED) if role == "assistant" else range(int(text), int(text) + _ADDED)
    return ids


_DIALECTS = {
    "completions": _Dialect(
        "completions",
        lambda turns: {"prompt": _tokens(turns), "return_token_ids": True},
        lambda answer: answer["choices"][0]["text"],
    ),
    "chat": _Dialect(
        "chat/completions",
        lambda turns: {"messages": _messages(turns)},
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    "responses": _Dialect(
        "responses",
        lambda turns: {"input": _messages(turns)},
        lambda answer: answer["output"][0]["content"][0]["text"],
    ),
    "messages": _Dialect(
        "messages",
        lambda turns: {"messages": _messages(turns), "max_tokens": _SAMPLED},
        lambda answer: answer["content"][0]["text"],
    ),
}


async def _answer(request: web.Request) -> web.Response:
    if request.path.endswith("/models"):
        return web.json_response({"data": [{"id": "policy", "policy_version": 0}]})
    body = await request.json()
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "token_ids": list(range(_SAMPLED))}
    text = "x" * _SAMPLED
    if "messages" in body:
        prompt = _tokens([(message["role"], message["content"]) for message in body["messages"]])
        logprobs: dict[str, Any] = {"content": [{"token": "x", "logprob": -0.5}] * _SAMPLED}
        choice |= {"message": {"role": "assistant", "content": text}}
    else:
        prompt = body["prompt"]
        logprobs = {"token_logprobs": [-0.5] * _SAMPLED, "tokens": ["x"] * _SAMPLED}
        choice |= {"text": text}
    choice |= {"prompt_token_ids": prompt, "logprobs": logprobs}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": _SAMPLED, "total_tokens": len(prompt) + _SAMPLED}
    return web.json_response({"id": "x", "object": "answer", "choices": [choice], "usage": usage, "policy_version": 0})


async def _session(http: aiohttp.ClientSession, base_url: str, dialect: _Dialect, latencies: list[float]) -> None:
    """Make the calls of one session, one after the other, and append their latencies."""
    turns: Turns = []
    for number in range(_CALLS_OF_A_SESSION):
        turns.append(("user", str(number)))
        body = {"model": "policy", **dialect.body(turns)}
        began = time.perf_counter()
        async with http.post(f"{base_url}/{dialect.path}", json=body) as response:
            answer: dict[str, Any] = await response.json()
        latencies.append(time.perf_counter() - began)
        if response.status != 200:
            raise RuntimeError(f"a call was answered with {response.status}: {answer}")
        turns.append(("assistant", dialect.text(answer)))


def _sessions(base_urls: list[str], at_once: int, dialect: str = "completions") -> tuple[list[float], float]:
    """Return the latencies of all calls, and the calls per second."""
    latencies: list[float] = []

    async def run() -> float:
        waiting = iter(base_urls)
        async with aiohttp.ClientSession() as http:

            async def worker() -> None:
                for base_url in waiting:
                    await _session(http, base_url, _DIALECTS[dialect], latencies)

            began = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(at_once)))
            return len(latencies) / (time.perf_counter() - began)

    return latencies, asyncio.run(run())


def _costs(under_test: GatewayUnderTest, base_urls: list[str], raw_url: str, dialect: str) -> tuple[float, float]:
    """Milliseconds that a gateway adds to the median call of a dialect, and its CPU time in ms a call. Without
    a gateway, Responses and Messages are chats, because a server does not speak them."""
    raw = _sessions([raw_url] * len(base_urls), 1, "chat")[0]
    process = psutil.Process(under_test.process.pid)
    before = process.cpu_times()
    latencies = _sessions(base_urls, 1, dialect)[0]
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return 1000 * (percentile(latencies, 50) - percentile(raw, 50)), 1000 * cpu_s / len(latencies)


def _restart(settings: Settings, run: str, url: str) -> tuple[float, float]:
    """Seconds from kill -9 of a gateway until the process that its supervisor starts again is ready, the supervisor's
    pause of half a second included, and the CPU time of that process in seconds."""
    with supervised_gateway(settings.kafka, run, url, settings.directory) as under_test:
        supervisor, name = under_test.supervisor, "gateway-0"
        killed = supervisor.kill(name)
        began = time.perf_counter()
        under_test.until(lambda: supervisor.is_ready(name) and supervisor.pids[name] != killed, "its restart")
        times = psutil.Process(supervisor.pids[name]).cpu_times()
        return time.perf_counter() - began, times.user + times.system


def _started(under_test: GatewayUnderTest, count: int) -> list[str]:
    groups = [under_test.start_session(group_size=1) for _ in range(count)]
    return [group["base_url"] for group in groups]


def measure(settings: Settings) -> LatencyRow:
    """Measure the latencies of single calls, and the calls per second of sixteen concurrent sessions."""
    sessions = max(2, min(settings.rollouts, 1000) // _CALLS_OF_A_SESSION // 2)
    ours: list[tuple[float, ...]] = []
    raw: list[tuple[float, ...]] = []
    rates: list[float] = []
    raw_rates: list[float] = []
    others: dict[str, list[tuple[float, float]]] = {dialect: [] for dialect in _DIALECTS if dialect != "completions"}
    # No session ends, so all sessions of all repetitions count as open and need room.
    room = {"learner.max_policy_lag": 1000, "worker.concurrency": 1000, "topics.partitions": settings.partitions}
    with (
        prepared(settings, "gateway") as run,
        serving_http(_answer) as url,
        gateway(settings.kafka, run, url, settings.directory, **room) as under_test,
    ):
        _sessions(_started(under_test, 2), 1)  # open connections and warm up
        for _repetition in itertools.repeat(None, settings.repetitions):
            raw.append(tuple(_sessions([url] * sessions, 1)[0]))
            ours.append(tuple(_sessions(_started(under_test, sessions), 1)[0]))
            raw_rates.append(_sessions([url] * sessions, _AT_ONCE)[1])
            rates.append(_sessions(_started(under_test, sessions), _AT_ONCE)[1])
            for dialect, values in others.items():
                values.append(_costs(under_test, _started(under_test, sessions), url, dialect))
        restarts = [_restart(settings, run, url) for _repetition in range(settings.repetitions)]
    added = median(percentile(o, 50) - percentile(r, 50) for o, r in zip(ours, raw, strict=True))
    return LatencyRow(
        name="gateway",
        what=f"a model call through a gateway, recorded before it is answered; at once: {_AT_ONCE} sessions",
        baseline="the same call to the server itself, which answers at once",
        ours=tuple(ours),
        raw=tuple(raw),
        figures={
            "p50 added ms": 1000 * added,
            **{f"p50 added ms, {dialect}": median(ms for ms, _cpu in values) for dialect, values in others.items()},
            **{f"CPU ms a call, {dialect}": median(cpu for _ms, cpu in values) for dialect, values in others.items()},
            "restart s": min(wall for wall, _cpu in restarts),
            "restart CPU s": min(cpu for _wall, cpu in restarts),
            "calls/s": median(rates),
            "raw calls/s": median(raw_rates),
        },
    )
