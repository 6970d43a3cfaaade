"""Targets that give hostile bodies to the parsers of requests and answers, or send hostile requests to real servers on
loopback."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.pipeline.config import ServiceConfig
from rollstream.pipeline.process.service import ServiceServer
from rollstream.pipeline.ui.server import parameters
from rollstream.pipeline.ui.server.access import host_of
from rollstream.pipeline.ui.server.answers import UnusableParameter
from rollstream.pipeline.ui.server.api import rollout_filter
from rollstream.pipeline.ui_config import UiConfig
from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.call_forms import ROUTES, parse_request, previous_turn, server_request
from rollstream.producers.gateway.streamed_answers import EventLines, StreamedAnswer, event_of
from rollstream.producers.inference.answers import samples_of
from rollstream.producers.inference.chat.conversations import ConversationMemory
from rollstream.producers.inference.chat.plain_template import PlainTemplate
from rollstream.producers.inference.dialects.chat_completions import ChatCompletions
from rollstream.producers.inference.dialects.completions import Completions
from rollstream.producers.inference.dialects.dialect import Dialect
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits
from rollstream.producers.json_text import decode
from rollstream.topics.errors import RollstreamError
from tests.hostile.flood_targets import Fates, Target
from tests.support.hostile_input import JSON_TEXTS, HostileInput
from tests.support.page import page_server
from tests.support.producing import ScriptedGenerator, serving
from tests.support.request_flood import INFERENCE, NAMES, SERVICE, failures, page_paths, request_flood
from tests.support.waiting import eventually

_TOKENS = [5, 6, 7]
_SOUND: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "stream_options": {"include_usage": True}},
    {"prompt": _TOKENS, "logprobs": 1, "max_tokens": 50, "stop": ["x"]},
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        ]
    },
)
_CHOICE: dict[str, Any] = {
    "index": 0,
    "finish_reason": "stop",
    "token_ids": _TOKENS,
    "prompt_token_ids": _TOKENS,
    "logprobs": {"content": [{"token": "a", "logprob": -1.0}] * 3},
    "message": {"role": "assistant", "content": "abc"},
    "weight_versions": [{"version": "1", "start": 0, "end": 3}],
}
_ANSWERS: dict[str, Any] = {
    "chat": {"choices": [_CHOICE], "metadata": {"weight_version": "1"}},
    "completions": {"choices": [{**_CHOICE, "text": "abc", "logprobs": {"token_logprobs": [-1.0] * 3}}]},
    "sglang": {
        "text": "abc",
        "output_ids": _TOKENS,
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None]] * 3},
    },
}
_EVENT: dict[str, Any] = {
    "id": "x",
    "choices": [
        {
            "index": 0,
            "delta": {
                "content": "a",
                "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}],
            },
            "logprobs": {"content": [{"token": "a", "logprob": -1.0}]},
            "token_ids": [5],
        }
    ],
    "usage": {"prompt_tokens": 1},
}


def _dialects() -> list[Callable[[Any], object]]:
    tokenizer = CharacterTokenizer()
    limits = RequestLimits(max_model_len=512, max_rows=8, vocab_size=tokenizer.vocab_size, truncated_sampling=False)
    chat = ChatCompletions(tokenizer, limits, PlainTemplate(tokenizer), ConversationMemory(1000))
    return [partial(_parsed, parser) for parser in (chat, Completions(tokenizer, limits))]


def _parsed(dialect: Dialect[Any], body: Any) -> object:
    return dialect.parse(body, "s")


def requests(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Parse bodies of requests as inference servers and gateways do."""
    del folder
    dialects, fates = _dialects(), Counter[str]()
    for _ in range(count):
        text = hostile.body(NAMES) if hostile.random.random() < 0.3 else _text(hostile, hostile.random.choice(_SOUND))
        try:
            body = decode(text)
        except (ValueError, RecursionError):
            fates["no JSON"] += 1
            continue
        parse = hostile.random.choice((*dialects, lambda given: _passed_on(hostile, given)))
        try:
            parse(body if isinstance(body, dict) else {})
        except (BadRequest, RollstreamError):
            fates["refused"] += 1
        else:
            fates["taken"] += 1
    return fates


def _passed_on(hostile: HostileInput, body: Any) -> object:
    """The body that a gateway sends on for an agent's."""
    request = parse_request(hostile.random.choice(tuple(ROUTES)), body, hostile.random.choice(JSON_TEXTS))
    assert len(request.messages) >= 0
    assert request.streamed in (True, False)
    assert request.wants_usage in (True, False)
    previous_turn(request, CallSequences())
    return server_request(
        request,
        model="m",
        temperature=1.0,
        sampling=hostile.random.choice(("run", "agent")),
    )


def _text(hostile: HostileInput, sound: Any) -> bytes:
    return json.dumps(hostile.changed(sound, NAMES)).encode("utf-8", "surrogatepass")


def answers(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Read answers of inference servers as workers and gateways do, whole and as streams."""
    del folder
    fates: Fates = Counter()
    for _ in range(count):
        dialect = hostile.random.choice(("chat", "completions", "sglang", "events"))
        try:
            if dialect == "events":
                _stream(hostile)
            else:
                samples_of(decode(_text(hostile, _ANSWERS[dialect])), dialect, source="http://server")  # type: ignore[arg-type]
        except RollstreamError:
            fates["refused"] += 1
        else:
            fates["taken"] += 1
    return fates


def _stream(hostile: HostileInput) -> None:
    whole, lines = StreamedAnswer(chat=hostile.random.random() < 0.5), EventLines()
    for _ in range(2):
        data = b"data: " + (_text(hostile, _EVENT) if hostile.random.random() < 0.9 else hostile.junk()) + b"\n\n"
        for event in lines.feed(hostile.damaged(data) if hostile.random.random() < 0.1 else data):
            whole.add(event_of(event, "http://server"))
    assert isinstance(whole.body(), dict)


def page_parameters(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Read parameters of the page's requests."""
    del folder
    names = ("version", "step", "reward_min", "limit", "order", "after", "text", "fate")
    fates: Fates = Counter()
    for _ in range(count):
        texts = [
            *JSON_TEXTS,
            "1",
            "-1",
            "9" * 30,
            "nan",
            "1e999",
            "٣",
            "true",
            "newest",
            hostile.junk().decode("latin-1"),
        ]
        query = {name: hostile.random.choice(texts) for name in hostile.random.sample(names, 4)}
        host_of(query.get("text", ""))
        readers: tuple[Callable[[], object], ...] = (
            partial(rollout_filter, query),
            partial(parameters.within, query, "limit", 100, 1000),
            partial(parameters.choice, query, "order", ("newest", "oldest")),
            partial(parameters.place, query.get("step", ""), query.get("version", "")),
            partial(parameters.page_of, (1, 2), ("a", "b"), query),
        )
        try:
            hostile.random.choice(readers)()
        except UnusableParameter:
            fates["refused"] += 1
        else:
            fates["taken"] += 1
    return fates


# ---------------------------------------------------------------------- servers


def _answered(url: str, paths: Sequence[str], hostile: HostileInput, count: int) -> Fates:
    actual = request_flood(url, paths, count, hostile)
    assert not failures(actual), actual
    return actual


def inference_server(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Send requests to an inference server whose engine is a script."""
    del folder
    with serving(ScriptedGenerator(["hello you"], versions=(3,)), max_rows=8, max_model_len=512) as server:
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        return _answered(server.url, INFERENCE, hostile, count)


def page(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Send requests to the page's server; it has no run, as runs need a broker."""
    del folder
    with page_server(UiConfig(port=0)) as server:
        return _answered(server.url, page_paths("none"), hostile, count)


def service_port(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Send requests to the service port that the overseer and every role have."""
    del folder
    with ServiceServer(ServiceConfig(port=0), run="main", role="run", process="run") as server:
        return _answered(server.url, SERVICE, hostile, count)


TARGETS = (
    Target("bodies of requests", requests, 5_000, 450),
    Target("answers of servers", answers, 5_000, 300),
    Target("parameters of the page", page_parameters, 5_000, 200),
    Target("requests to an inference server", inference_server, 300, 5, piece=10_000),
    Target("requests to the page", page, 400, 5, piece=10_000),
    Target("requests to a service port", service_port, 400, 5, piece=10_000),
)
