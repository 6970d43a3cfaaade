"""A client of the page's server that sends the headers it is told to, and a server in a thread of its own."""

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.ui.server.page_run import PageRun
from rollstream.pipeline.ui.server.page_server import PageServer
from rollstream.pipeline.ui_config import UiConfig
from tests.support.loops import loop_in_a_thread

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One answer of the server."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class PageClient:
    """Asks a server at an address, as the page does."""

    url: str

    @property
    def place(self) -> str:
        return urlsplit(self.url).netloc

    def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Answer:
        """Send one request, with these headers instead of the usual ones of the same names."""
        connection = http.client.HTTPConnection(self.place, timeout=_TIMEOUT_S)
        try:
            # The path is sent as it is: a client that mends it would hide what the server does with it.
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in {"Host": self.place, "Content-Length": str(len(body)), **(headers or {})}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """GET a path; headers are written with _ for -."""
        return self.ask("GET", path, {name.replace("_", "-"): value for name, value in headers.items()})

    def json(self, path: str) -> Any:
        """GET a path of the API that answers 200."""
        got = self.get(path)
        assert got.status == 200, f"{path}: {got.status} {got.body[:500]!r}"
        return got.json

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """The events of a stream: name and value of each."""
        connection = http.client.HTTPConnection(self.place, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path, headers={"Accept": "text/event-stream"})
            response = connection.getresponse()
            assert response.status == 200, response.read()[:500]
            assert response.headers["Content-Type"].startswith("text/event-stream")
            yield _events(response)
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    while line := response.readline():
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


@contextmanager
def page_server(config: UiConfig, *runs: RunConfig, archive: str = "") -> Iterator[PageServer]:
    """A server of some runs of the broker, or of an archive, in a thread of its own."""
    servers: list[PageServer] = []

    async def start() -> None:
        servers.append(await PageServer(config, {run.run: PageRun(run, archive) for run in runs}).__aenter__())

    async def close() -> None:
        await servers[0].__aexit__(None, None, None)

    with loop_in_a_thread() as loop:
        asyncio.run_coroutine_threadsafe(start(), loop).result(_TIMEOUT_S)
        try:
            yield servers[0]
        finally:
            asyncio.run_coroutine_threadsafe(close(), loop).result(_TIMEOUT_S)
