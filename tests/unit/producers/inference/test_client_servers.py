"""The client over several servers and engines, over real sockets."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from aiohttp import web

from rollstream.producers.inference.client import Completion, CompletionsClient
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.inference.requests import SampleRequest
from tests.support.producing import serving_http

CHOICE = {
    "index": 0,
    "text": "13",
    "finish_reason": "stop",
    "token_ids": [3, 4],
    "prompt_token_ids": [1, 2],
    "logprobs": {"tokens": ["1", "3"], "token_logprobs": [-0.5, -0.25]},
}
SPANS = [{"version": "17", "start": 0, "end": 1}, {"version": "18", "start": 1, "end": 2}]


class Server:
    """A server that records its requests and answers `answer`, or what `refuse` returns."""

    def __init__(self, *, version: int = 3, owner: str = "rollstream") -> None:
        self.version = version
        self.owner = owner
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.sessions: list[str] = []
        self.refuse: Callable[[str], web.Response | None] = lambda _path: None

    def paths(self) -> Counter[str]:
        return Counter(path for path, _body in self.requests)

    async def __call__(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.requests.append((request.path, body))
        if (refusal := self.refuse(request.path)) is not None:
            return refusal
        match request.path:
            case "/v1/models":
                model = {"id": "policy", "owned_by": self.owner, "policy_version": self.version}
                return web.json_response({"data": [model]})
            case "/tokenize":
                return web.json_response({"tokens": [1, 2], "count": 2})
            case "/inference/v1/generate":
                content = [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -0.25}]
                choice = {**CHOICE, "logprobs": {"content": content}, "weight_versions": SPANS}
                return web.json_response({"choices": [choice]})
            case "/generate":
                meta = {
                    "finish_reason": {"type": "stop"},
                    "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]],
                    "weight_versions": SPANS,
                }
                return web.json_response({"text": "13", "output_ids": [3, 4], "meta_info": meta})
        self.sessions.append(request.headers.get("X-Session-ID", ""))
        return web.json_response({"choices": [CHOICE], "policy_version": self.version})


async def ask(client: CompletionsClient, session: str = "") -> Completion:
    [completion] = await client.complete(
        SampleRequest(prompt="31>", n=1, max_tokens=8, temperature=1.0, seed=5, stop=("\n",), session=session)
    )
    return completion


@pytest.mark.parametrize(
    ("owner", "route"), [("vllm", "/inference/v1/generate"), ("sglang", "/generate"), ("rollstream", "/v1/completions")]
)
def test_the_kind_of_a_server_is_found_once_and_its_own_route_is_asked(owner: str, route: str) -> None:
    server = Server(owner=owner)

    async def run(base_url: str) -> list[Completion]:
        async with CompletionsClient([base_url]) as client:
            return [await ask(client) for _ in range(2)]

    with serving_http(server) as base_url:
        completions = asyncio.run(run(base_url))
    tokenized = {} if owner == "rollstream" else {"/tokenize": 2}
    assert server.paths() == {"/v1/models": 1, route: 2, **tokenized}
    for completion in completions:
        assert (completion.prompt_tokens.tolist(), completion.tokens.tolist()) == ([1, 2], [3, 4])
        assert completion.logprobs.tolist() == [-0.5, -0.25]
        assert completion.versions.tolist() == ([3, 3] if owner == "rollstream" else [17, 18])
        assert (completion.text, completion.weight_step, completion.replica_id) == ("13", -1, base_url)


@pytest.mark.parametrize(("owner", "route"), [("vllm", "/weight_info"), ("sglang", "/model_info")])
def test_the_version_of_an_engine_that_lists_none_is_the_label_of_its_weights(owner: str, route: str) -> None:
    server = Server(owner=owner, version=-1)
    labels = {"17": 17, "default": -1, None: -1}
    label: str | None = None

    def refuse(path: str) -> web.Response | None:
        if path != route:
            return None
        return web.json_response({"weight_version": label}) if label else web.Response(status=404)

    server.refuse = refuse

    async def version(base_url: str) -> int:
        async with CompletionsClient([base_url]) as client:
            return await client.version()

    with serving_http(server) as base_url:
        for label, number in labels.items():
            assert asyncio.run(version(base_url)) == number, label


def test_a_vllm_without_its_route_is_asked_for_completions_from_then_on() -> None:
    server = Server(owner="vllm")
    disabled = web.json_response

    def refuse(path: str) -> web.Response | None:
        message = {"error": {"message": "Scale-out endpoints are disabled.", "code": 403}}
        return disabled(message, status=403) if path == "/inference/v1/generate" else None

    server.refuse = refuse

    async def run(base_url: str) -> None:
        async with CompletionsClient([base_url]) as client:
            assert [(await ask(client)).versions.tolist() for _ in range(3)] == [[3, 3]] * 3
        async with CompletionsClient([base_url], engine="vllm") as client:
            with pytest.raises(InferenceRefused, match="Scale-out endpoints are disabled"):
                await ask(client)

    with serving_http(server) as base_url:
        asyncio.run(run(base_url))
    assert server.paths()["/inference/v1/generate"] == 2
    assert server.paths()["/v1/completions"] == 3


def test_a_session_stays_with_one_server_and_names_itself() -> None:
    servers = [Server(), Server(), Server()]

    async def run(urls: list[str]) -> None:
        async with CompletionsClient(urls, engine="rollstream") as client:
            for _ in range(3):
                await asyncio.gather(*(ask(client, f"group-{number}") for number in range(24)))

    with ExitStack() as stack:
        asyncio.run(run([stack.enter_context(serving_http(server)) for server in servers]))
    counts = Counter(session for server in servers for session in set(server.sessions))
    assert counts == {f"group-{number}": 1 for number in range(24)}
    assert all(len(server.sessions) == 3 * len(set(server.sessions)) > 0 for server in servers)


def test_an_aborted_sample_is_asked_for_again() -> None:
    answers = [{**CHOICE, "finish_reason": "abort"}, CHOICE]

    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [answers.pop(0)], "policy_version": 3})

    async def run(base_url: str) -> Completion:
        async with CompletionsClient([base_url], engine="rollstream") as client:
            return await ask(client)

    with serving_http(handler) as base_url:
        assert asyncio.run(run(base_url)).tokens.tolist() == [3, 4]
    assert answers == []


def test_a_server_whose_weights_lag_gets_no_requests_until_it_has_caught_up() -> None:
    slow, fast = Server(version=1), Server(version=1)

    async def run(urls: list[str]) -> None:
        async with CompletionsClient(urls, engine="rollstream", max_version_skew=1) as client:
            for number in range(16):
                await ask(client, f"s{number}")
            assert slow.sessions
            fast.version = 9
            for number in range(16):
                await ask(client, f"s{number}")
            slow.sessions.clear()
            for number in range(16):
                assert (await ask(client, f"s{number}")).lowest_version == 9
            assert slow.sessions == []
            assert await client.version() == 1, "the lowest of all servers"
            slow.version = 9
            deadline = time.monotonic() + 60
            while not slow.sessions and time.monotonic() < deadline:
                for number in range(16):
                    await ask(client, f"s{number}")
                await asyncio.sleep(0.05)

    with serving_http(slow) as first, serving_http(fast) as second:
        asyncio.run(run([first, second]))
    assert slow.sessions


def test_a_server_that_fails_at_requests_is_left_alone_and_another_answers() -> None:
    broken, whole = Server(), Server()
    broken.refuse = lambda path: web.Response(status=500) if path == "/v1/completions" else None

    async def run(urls: list[str]) -> list[Completion]:
        async with CompletionsClient(urls) as client:
            return [await ask(client, f"s{number}") for number in range(20)]

    with serving_http(broken) as first, serving_http(whole) as second:
        completions = asyncio.run(run([first, second]))
    assert {completion.replica_id for completion in completions} == {second}
    assert 0 < broken.paths()["/v1/completions"] < 10


def test_a_request_at_which_every_server_fails_is_given_up_long_before_its_deadline() -> None:
    server = Server()
    server.refuse = lambda path: web.Response(status=500, text="CUDA error") if path == "/v1/completions" else None

    async def run(url: str) -> None:
        async with CompletionsClient([url], timeout_s=600) as client:
            await ask(client)

    with serving_http(server) as url, pytest.raises(InferenceRefused, match=r"500 CUDA error"):
        asyncio.run(run(url))
    assert server.paths()["/v1/completions"] == 3


def test_a_server_that_does_not_speak_http_is_unavailable() -> None:
    async def garbage(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(garbage, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            async with CompletionsClient([url], engine="rollstream", timeout_s=0.5) as client:
                await ask(client)

    with pytest.raises(InferenceUnavailable, match="Bad status line"):
        asyncio.run(run())
