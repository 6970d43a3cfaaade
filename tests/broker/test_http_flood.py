"""Floods of hostile requests to every server that we ship, started as users start them: none ends, hangs or fails, and
an honest request is answered afterwards.
"""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rollstream.topics.kafka import provisioning
from tests.broker.test_inference_server import SMALL, publish
from tests.support.gateways import gateway
from tests.support.recipe import write_model
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SEED = int(os.environ.get("FLOOD_SEED", "1"))
REQUESTS = int(os.environ.get("FLOOD_REQUESTS", "2000"))
TIMEOUT_S = 60.0
INFERENCE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
    "/v1/models",
)
GATEWAY = ("/rl/start_session", "/rl/set_reward", "/rl/end_session", "/sessions/x", "/sessions/x/v1/chat/completions")
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1e308, 1e-320, float("nan"), float("inf"), 0.5)
TEXTS = (
    "",
    "\0",
    "a\x1b[31m\u202e",
    "../../etc/passwd",
    "x" * 5000,
    "\ud800",
    "' or 1=1 --",
    "<script>alert(1)</script>",
)
NAMES = (
    *("model", "messages", "prompt", "max_tokens", "n", "seed", "temperature", "top_p", "logprobs", "tools", "stream"),
    *("token_ids", "tokens", "stop", "task_id", "group_size", "environment", "session_id", "reward", "components"),
)


class Requests:
    """Requests as bytes, by one seed."""

    def __init__(self, seed: int, paths: tuple[str, ...]) -> None:
        self._random = random.Random(seed)
        self._paths = paths

    def next(self) -> bytes:
        choose, kind = self._random.choice, self._random.random()
        path = choose((*self._paths, "/", "/nowhere", "/metrics", f"/{'../' * 9}etc/passwd", "/%00", "/\xff"))
        if kind < 0.1:
            return self._random.randbytes(self._random.choice((1, 40, 3000)))
        if kind < 0.2:
            # Half a request, as of a client that hung up.
            return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode("latin-1")
        body = self._body() if kind < 0.9 else self._random.randbytes(200)
        method = choose(("POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"))
        headers = [f"Host: {choose(('x', 'localhost', '127.0.0.1', chr(255)))}", "Connection: close"]
        headers.append(f"Content-Length: {choose((len(body), len(body), len(body), len(body) + 1, -1, 'x', 2**70))}")
        odd = (
            "Authorization: Bearer \xff",
            "Content-Type: text/\x01",
            "Transfer-Encoding: chunked",
            "X: " + "y" * 9000,
        )
        headers += self._random.sample(odd, self._random.choice((0, 0, 1, 2)))
        lines = [f"{method} {path} HTTP/1.1", *headers, "", ""]
        return "\r\n".join(lines).encode("latin-1") + body

    def _body(self) -> bytes:
        if self._random.random() < 0.05:
            return b"[" * 100_000
        names = self._random.sample(NAMES, self._random.randint(0, 8))
        return json.dumps({name: self._value(2) for name in names}).encode("utf-8", "surrogatepass")

    def _value(self, depth: int) -> object:
        choose = self._random.choice
        match self._random.randrange(6 if depth else 4):
            case 0:
                return choose(NUMBERS)
            case 1:
                return choose(TEXTS)
            case 2:
                return choose((None, True, False, [], {}))
            case 3:
                return [{"role": choose(("user", "assistant", *TEXTS)), "content": choose((*TEXTS, None))}]
            case 4:
                return [self._value(depth - 1) for _ in range(3)]
            case _:
                return {choose((*NAMES, *TEXTS)): self._value(depth - 1) for _ in range(3)}


def flood(url: str, paths: tuple[str, ...], requests: int, alive: Callable[[], bool]) -> Counter[str]:
    """Send requests on connections of their own, eight at a time; count answers by status."""
    place, made, answers = urlsplit(url), Requests(SEED, paths), Counter[str]()
    assert place.hostname is not None
    for _ in range(0, requests, 8):
        connections = []
        for _ in range(8):
            connection = socket.create_connection((place.hostname, place.port or 80), TIMEOUT_S)
            with contextlib.suppress(ConnectionError):  # The server may answer before it has read everything.
                connection.sendall(made.next())
            connections.append(connection)
        for connection in connections:
            with connection:
                try:
                    # Nothing more comes, so a server that waits for the rest of a body has to give up.
                    connection.shutdown(socket.SHUT_WR)
                    answer = connection.recv(65536)
                except ConnectionError:
                    answer = b""
            found = re.match(rb"HTTP/1\.[01] (\d+)", answer)
            answers[found[1].decode() if found else "closed"] += 1
        assert alive()
    return answers


def judged(name: str, answers: Counter[str], log: str) -> None:
    print(f"{name}: seed {SEED}, {answers.total()} requests, {dict(sorted(answers.items()))}")
    assert not {status for status in answers if status.startswith("5") and status not in ("501", "503")}, answers
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


@pytest.mark.long  # Three servers, one after the other
def test_no_request_ends_or_hangs_a_server(real_run: RealRun, compiled: Path) -> None:
    run = real_run
    provisioning.apply(run.kafka, run.topics, run.name)
    publish(run, write_model(run.directory / "model", **SMALL), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
        server = run.start("infer", learner__pretrained=run.directory / "model", inference__max_model_len=512)
    page = run.start("ui")

    def logged(process: "subprocess.Popen[bytes]", pattern: str) -> str:
        def found() -> str:
            assert process.poll() is None, run.log_of(process)
            match = re.search(pattern, run.log_of(process))
            return match[1] if match else ""

        return eventually(found, 240, pattern)

    inference = logged(server, r'"inference_listening".*?"url": "(.*?)"')
    page_url = logged(page, r"page of runs? .*: (http://\S+)")
    api = f"/api/runs/{run.name}"
    paths = (
        f"{api}/overview",
        f"{api}/rollouts?text=%ff&limit=-1",
        f"{api}/rollouts/x/-1",
        f"{api}/commands",
        "/api/runs",
    )
    judged("infer", flood(inference, INFERENCE, REQUESTS, lambda: server.poll() is None), run.log_of(server))
    judged("ui", flood(page_url, paths, REQUESTS, lambda: page.poll() is None), run.log_of(page))
    with gateway(run.kafka, run.name, f"{inference}/v1", run.directory) as front:
        answers = flood(front.url, GATEWAY, REQUESTS, lambda: front.process.poll() is None)
        judged("gateway", answers, front.log.read_text())

        def honest() -> bool:
            return front.post("/rl/start_session", {"task_id": "t", "environment": "outside"})[0] in (200, 201)

        eventually(honest, 60, "a session of an honest agent")
