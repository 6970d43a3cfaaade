"""Admission to a server: its key, its limits, and the drain that finishes requests in progress."""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from rollstream.pipeline.config import RunConfig, load, secret_variables
from rollstream.topics.errors import ConfigurationError
from tests.support.producing import SortingGenerator, serving
from tests.support.waiting import eventually
from tests.unit.producers.inference.test_server import client_of, get, post

BODY = json.dumps({"prompt": "21>", "temperature": 0}).encode()


@pytest.fixture
def held() -> Iterator[tuple[SortingGenerator, threading.Event, threading.Event]]:
    """A generator whose first call waits, the event that the call began, and the event that lets it continue."""
    began, go_on = threading.Event(), threading.Event()

    def wait(_prompts: list[str]) -> None:
        began.set()
        assert go_on.wait(300)

    try:
        yield SortingGenerator(before_generate=wait), began, go_on
    finally:
        go_on.set()


def test_requests_hold_the_servers_key_and_probes_need_none(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    with serving(SortingGenerator(), api_key=f"file:{tmp_path / 'key'}") as server:
        eventually(lambda: get(server, "/readyz")[0] == 200, 60, "ready")
        assert get(server, "/livez")[0] == get(server, "/metrics")[0] == 200
        assert get(server, "/v1/models")[0] == 401
        assert post(server, BODY)[0] == 401
        for key, allowed in (("s3cret", True), ("wrong", False)):
            with openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=300) as client:
                if allowed:
                    answer = client.completions.create(model="policy", prompt="21>", temperature=0)
                    assert answer.choices[0].text == "12"
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


def test_a_key_beyond_ascii_is_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_KEY", "s3cret")
    with serving(SortingGenerator(), api_key="env:INFER_KEY") as server:
        for encoding in ("utf-8", "latin-1"):
            # urllib sends each character of a header as one byte.
            key = "s3crét".encode(encoding).decode("latin-1")
            request = urllib.request.Request(f"{server.base_url}/models", headers={"Authorization": f"Bearer {key}"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=300)
            with refused.value:
                assert refused.value.code == 401


def test_the_key_of_the_server_is_the_workers_too_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_KEY", "s3cret")
    config = load(flags=["inference.api_key=env:INFER_KEY"])
    assert config.worker.api_key == config.inference.api_key == "env:INFER_KEY"
    assert secret_variables(config) == {"INFER_KEY"}
    with pytest.raises(ConfigurationError, match="is a secret"):
        load(flags=["inference.api_key=s3cret"])
    assert load().worker.api_key == RunConfig().worker.api_key == ""
    assert os.environ["INFER_KEY"] not in repr(config)


def test_a_key_that_cannot_be_read_is_one_line() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"inference\.api_key"),
        serving(SortingGenerator(), api_key="env:NONE"),
    ):
        pass


def test_a_server_that_too_many_wait_for_says_when_to_try_again(
    held: tuple[SortingGenerator, threading.Event, threading.Event],
) -> None:
    generator, began, go_on = held
    with (
        serving(generator, max_rows=1, max_waiting_requests=2) as server,
        client_of(server) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        eventually(lambda: server.version == 0, 60, "weights are loaded")

        def asked() -> Any:
            return pool.submit(client.completions.create, model="policy", prompt="21>", temperature=0)

        first = asked()
        assert began.wait(300)
        waiting = [asked(), asked()]
        eventually(lambda: "waiting_requests 2" in get(server, "/metrics")[1], 60, "two requests wait")
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="policy", prompt="21>")
        assert refused.value.response.headers["Retry-After"] == "1"
        go_on.set()
        assert [ask.result(300).choices[0].text for ask in (first, *waiting)] == ["12"] * 3


def test_a_drain_answers_what_was_let_in_and_refuses_the_rest(
    held: tuple[SortingGenerator, threading.Event, threading.Event],
) -> None:
    generator, began, go_on = held
    running = ExitStack()
    server = running.enter_context(serving(generator, max_rows=1))
    with running, client_of(server) as client, ThreadPoolExecutor(3) as pool:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        asks = [pool.submit(client.completions.create, model="policy", prompt="21>", temperature=0) for _ in range(2)]
        assert began.wait(300)
        eventually(lambda: "waiting_requests 1" in get(server, "/metrics")[1], 60, "one decodes and one waits")
        closing = pool.submit(running.close)
        eventually(lambda: get(server, "/readyz") == (503, "draining\n"), 60, "the server drains")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="policy", prompt="21>")
        assert refused.value.status_code == 503
        assert refused.value.response.headers["Retry-After"] == "1"
        go_on.set()
        assert [ask.result(300).choices[0].text for ask in asks] == ["12", "12"]
        closing.result(300)


def test_a_client_that_goes_away_takes_its_request_with_it(
    held: tuple[SortingGenerator, threading.Event, threading.Event],
) -> None:
    generator, began, go_on = held
    with serving(generator, max_rows=1) as server, client_of(server) as client, ThreadPoolExecutor(1) as pool:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        first = pool.submit(client.completions.create, model="policy", prompt="21>", temperature=0)
        assert began.wait(300)
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model="policy", prompt="43>", timeout=0.2)
        eventually(lambda: "admitted_requests 1" in get(server, "/metrics")[1], 60, "the second is gone")
        go_on.set()
        assert first.result(300).choices[0].text == "12"
        assert client.completions.create(model="policy", prompt="65>", temperature=0).choices[0].text == "56"
    assert "43>" not in [prompt for _, prompts in generator.batches for prompt in prompts]
