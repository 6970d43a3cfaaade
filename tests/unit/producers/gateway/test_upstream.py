"""Upstreams know the kind of a server, and the version of its weights, before they send it a request; failed servers
and servers with old weights are left alone."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from aiohttp import web

from rollstream.producers.flow.policy_versions import PolicyVersions
from rollstream.producers.gateway.errors import UpstreamRefused
from rollstream.producers.gateway.upstream import Upstream
from rollstream.producers.inference.errors import ContextTooLong, InferenceUnavailable
from rollstream.topics.records import PolicyManifest
from tests.support.producing import serving_http

TURN = {"prompt_token_ids": [1], "token_ids": [2]}
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class OnePolicy:
    """Policies with one version on record: version 4, which its digest names, too."""

    def __init__(self) -> None:
        self.versions = PolicyVersions()
        self.reads = 0

    def read(self, _wait_s: float) -> PolicyVersions:
        self.reads += 1
        manifest = PolicyManifest(
            version=4, learner="l", step=40, epoch="e", tensors=(), chunks=(), digest="abcd", model="{}"
        )
        self.versions.add(manifest)
        return self.versions


class Server:
    """Answers lists of models, labels and calls; refuses the first requests of some paths as a busy server does."""

    def __init__(
        self,
        owner: str,
        *,
        label: str | None = None,
        label_route: str = "",
        paused: int = 0,
        silent: str = "",
        metadata: Any = None,
        aborted: int = 0,
        version: int = -1,
        retry_after: str = "",
        **busy: int,
    ) -> None:
        """It is paused at the first `paused` queries, and then has version 4; requests of `silent` get no answer. It
        aborts the first `aborted` calls. Its list of models has `version`, and its refusals have `retry_after`."""
        self.silent, self.answer = silent, {"choices": []} | ({} if metadata is None else {"metadata": metadata})
        self.owner, self.label, self.label_route, self.paused = owner, label, label_route, paused
        self.busy, self.aborted = busy, aborted
        self.version, self.headers = version, {"Retry-After": retry_after} if retry_after else {}
        self.asked = Counter[str]()
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, http: web.Request) -> web.Response:
        name = http.path.rsplit("/", 1)[-1]
        self.asked[name] += 1
        if name == self.silent:
            await asyncio.Event().wait()
        if self.asked[name] <= self.busy.get(name, 0):
            return web.Response(status=503, headers=self.headers)
        if http.path == "/v1/models" and self.owner:
            return web.json_response({"data": [{"id": "m", "owned_by": self.owner, "policy_version": self.version}]})
        if http.path == "/is_paused" and self.paused:
            paused = self.asked[name] <= self.paused
            self.label = self.label if paused else "4"
            return web.json_response({"is_paused": paused})
        if self.label_route and http.path == self.label_route:
            return web.json_response({"weight_version": self.label})
        if http.method == "POST":
            self.bodies.append(await http.json())
            if self.bodies[-1].get("stream"):
                return web.Response(text='data: {"choices": []}\n\ndata: [DONE]\n\n')
            aborts = len(self.bodies) <= self.aborted
            return web.json_response({"choices": [{"finish_reason": "abort"}]} if aborts else self.answer)
        return web.Response(status=404, text="<html>")


def asked(
    server: Server, *, calls: int = 1, stream: bool = False, timeout_s: float = 60.0, **fields: Any
) -> tuple[Upstream, Any]:
    """Make calls with these fields through a new upstream; return it, and the last answer or its events."""

    async def ask(url: str) -> tuple[Upstream, Any]:
        policies = OnePolicy()
        answer: Any = None
        async with Upstream([url], model="m", api_key="", timeout_s=timeout_s, policies=policies) as upstream:
            for _call in range(calls):
                if stream:
                    body = {"stream": True, **fields}
                    answer = [event async for event in upstream.stream("s.0", "/chat/completions", body, lambda: TURN)]
                else:
                    answer = await upstream.call("s.0", "/chat/completions", {"n": 1, **fields}, lambda: TURN)
            return upstream, answer

    with serving_http(server) as url:
        return asyncio.run(ask(url))


async def ask_all(upstream: Upstream) -> None:
    """Make a call in each of 16 sessions at the same time."""
    calls = (upstream.call(f"s.{number}", "/chat/completions", {"n": 1}) for number in range(16))
    await asyncio.gather(*calls)


def with_servers(*servers: Server, use: Callable[[Upstream], Awaitable[None]], timeout_s: float = 60.0) -> None:
    """Run `use` with an upstream of these servers."""

    async def run(urls: list[str]) -> None:
        policies = OnePolicy()
        async with Upstream(urls, model="m", api_key="", timeout_s=timeout_s, policies=policies) as upstream:
            await use(upstream)

    with ExitStack() as stack:
        asyncio.run(run([stack.enter_context(serving_http(server)) for server in servers]))


@pytest.mark.parametrize(
    ("owner", "continues"), [("rollstream", True), ("vllm", False), ("sglang", False), ("somebody", False), ("", False)]
)
def test_only_our_servers_get_the_last_turn_and_each_is_asked_once_for_its_kind(owner: str, continues: bool) -> None:
    server = Server(owner)
    asked(server, calls=3)
    assert [body.get("previous_turn") for body in server.bodies] == [TURN if continues else None] * 3
    assert server.asked["models"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("owner", ["rollstream", "vllm", "sglang", "somebody", ""])
def test_no_engine_takes_its_own_sampling_parameters_from_the_checkpoint(owner: str, stream: bool) -> None:
    server = Server(owner)
    asked(server, stream=stream)
    asked(server, stream=stream, top_k=5)
    known = owner in ("rollstream", "vllm", "sglang")
    sent = [{name: body[name] for name in NEUTRAL if name in body} for body in server.bodies]
    assert sent == ([NEUTRAL, {**NEUTRAL, "top_k": 5}] if known else [{}, {"top_k": 5}]), "others may refuse them"


def test_no_request_is_sent_before_the_kind_of_its_server_is_known() -> None:
    server = Server("rollstream", models=2)
    asked(server)
    assert server.asked["models"] == 3
    assert server.bodies == [{"n": 1, "previous_turn": TURN, **NEUTRAL}]
    silent = Server("rollstream", models=10**9)
    with pytest.raises(InferenceUnavailable, match="/models gave no answer"):
        asked(silent, timeout_s=0.3)
    assert silent.bodies == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_vllm_are_of_the_weights_in_force_when_they_were_asked_for(stream: bool) -> None:
    server = Server("vllm", label="4", label_route="/weight_info", weight_info=1)
    upstream, answer = asked(server, stream=stream)
    assert upstream.newest_version == 4
    if stream:
        assert [(event.label, event.data) for event in answer] == [("4", '{"choices": []}'), ("4", "[DONE]")]
    else:
        assert answer.body == {"choices": [], "metadata": {"weight_version": "4"}}
    assert len(server.bodies) == 1


def test_a_request_that_a_server_aborts_is_sent_again_until_the_time_of_the_call_is_over() -> None:
    server = Server("vllm", aborted=2)
    _upstream, answer = asked(server)
    assert answer.body == {"choices": []}
    assert len(server.bodies) == 3
    with pytest.raises(InferenceUnavailable, match=r"within 0\.3 s \(http.* aborted the request\)"):
        asked(Server("vllm", aborted=10**9), timeout_s=0.3)


def test_a_request_that_vllm_would_keep_waiting_has_the_weights_that_sample_it() -> None:
    server = Server("vllm", label="3", label_route="/weight_info", paused=3)
    _upstream, answer = asked(server)
    assert answer.body["metadata"] == {"weight_version": "4"}
    assert server.asked["is_paused"] == 4
    drained = Server("vllm", label="3", label_route="/weight_info", paused=10**9)
    with pytest.raises(InferenceUnavailable, match="is paused"):
        asked(drained, timeout_s=5.5)
    assert drained.bodies == []


@pytest.mark.parametrize(
    ("label", "version"), [("4", 4), ("abcd", 4), ("l/40", 4), ("main", -1), ("default", -1), (None, -1)]
)
@pytest.mark.parametrize(("owner", "route"), [("vllm", "/weight_info"), ("sglang", "/model_info")])
def test_the_newest_version_is_that_of_a_label_that_the_run_knows(
    owner: str, route: str, label: str | None, version: int
) -> None:
    upstream, answer = asked(Server(owner, label=label, label_route=route))
    assert upstream.newest_version == version
    named = label if owner == "vllm" and label not in (None, "default") else None
    assert (answer.body.get("metadata") or {}).get("weight_version") == named


@pytest.mark.parametrize("silent", ["models", "is_paused", "weight_info"])
def test_the_time_of_a_call_bounds_whatever_is_asked_before_it(silent: str) -> None:
    server = Server("vllm", label="4", label_route="/weight_info", silent=silent)
    with pytest.raises(InferenceUnavailable, match=r"no answer from .* within 0\.5 s"):
        asked(server, timeout_s=0.5)
    assert server.asked[silent] >= 1
    assert server.bodies == []


def test_metadata_of_the_server_is_kept_and_what_is_no_object_is_replaced() -> None:
    label = {"label": "4", "label_route": "/weight_info"}
    for metadata, expected in (({"weight_version": "5", "x": 1}, {"weight_version": "5", "x": 1}), ("x", {})):
        _upstream, answer = asked(Server("vllm", metadata=metadata, **label))  # type: ignore[arg-type]
        assert answer.body["metadata"] == {"weight_version": "4"} | expected


def test_a_vllm_without_the_route_of_its_label_names_none() -> None:
    upstream, answer = asked(Server("vllm"), calls=2)
    assert upstream.newest_version == -1
    assert json.dumps(answer.body) == '{"choices": []}'


def test_only_the_server_with_the_newer_weights_is_asked_until_the_other_has_caught_up() -> None:
    old, new = Server("rollstream", version=1), Server("rollstream", version=9)

    async def use(upstream: Upstream) -> None:
        assert await upstream.version() == 9
        await ask_all(upstream)
        assert (len(old.bodies), len(new.bodies)) == (0, 16)
        old.version = 9
        deadline = time.monotonic() + 60
        while not old.bodies and time.monotonic() < deadline:
            await ask_all(upstream)
        assert old.bodies

    with_servers(old, new, use=use)


def test_the_versions_of_answers_tell_which_server_has_old_weights() -> None:
    first, second = Server("rollstream"), Server("rollstream")

    async def use(upstream: Upstream) -> None:
        await ask_all(upstream)
        assert min(len(first.bodies), len(second.bodies)) > 0
        for url, version in zip(upstream.urls, (1, 9), strict=True):
            upstream.note_version(url, version)
        first.bodies.clear()
        await ask_all(upstream)
        assert first.bodies == []
        assert upstream.newest_version == 9

    with_servers(first, second, use=use)


def test_a_server_that_fails_at_calls_is_left_alone_and_another_answers() -> None:
    broken, whole = Server("vllm"), Server("vllm")
    answered, failed = broken.__call__, list[str]()

    async def fail_at_calls(http: web.Request) -> web.Response:
        if http.method != "POST":
            return await answered(http)
        failed.append(http.path)
        return web.Response(status=500, text="CUDA error")

    with_servers(fail_at_calls, whole, use=ask_all)  # type: ignore[arg-type]
    assert len(whole.bodies) == 16
    assert 0 < len(failed) <= 16


def test_a_call_at_which_every_server_fails_is_given_up_long_before_its_deadline() -> None:
    failed = list[str]()

    async def fail(http: web.Request) -> web.Response:
        failed.append(http.method)
        return web.Response(status=500 if http.method == "POST" else 404, text="CUDA error")

    with pytest.raises(UpstreamRefused, match="500 CUDA error"):
        with_servers(fail, use=ask_once, timeout_s=600)  # type: ignore[arg-type]
    assert failed.count("POST") == 3


async def ask_once(upstream: Upstream) -> None:
    await upstream.call("s", "/chat/completions", {"n": 1})


class Strict(Server):
    """Refuses a call whose limit does not fit after its prompt, as vLLM does."""

    async def __call__(self, http: web.Request) -> web.Response:
        if http.method == "POST" and ({"max_tokens", "max_completion_tokens", "too_long"} & (await http.json()).keys()):
            self.bodies.append(await http.json())
            return web.Response(status=400, text="This model's maximum context length is 64 tokens.")
        return await super().__call__(http)


def test_a_limit_that_does_not_fit_after_the_prompt_is_left_out_and_only_a_long_prompt_is_refused() -> None:
    server = Strict("vllm")
    _upstream, answer = asked(server, max_tokens=4096, max_completion_tokens=4096)
    assert answer.body == {"choices": []}
    assert [sorted({"max_tokens", "max_completion_tokens"} & body.keys()) for body in server.bodies] == [
        ["max_completion_tokens", "max_tokens"],
        [],
    ]
    with pytest.raises(UpstreamRefused) as refused:
        asked(Strict("vllm"), max_tokens=4096, too_long=True)
    assert isinstance(refused.value.cause, ContextTooLong)
