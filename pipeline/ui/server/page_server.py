"""The HTTP server of the page: it checks requests, routes them, serves the page's files, and adds security headers."""

import asyncio
import hashlib
import logging
import re
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

from rollstream.pipeline.ui.server import answers
from rollstream.pipeline.ui.server.access import CHANGE_HEADER, Access
from rollstream.pipeline.ui.server.api import Api
from rollstream.pipeline.ui.server.page_run import PageRun, closed
from rollstream.pipeline.ui_config import UiConfig
from rollstream.topics.errors import ConfigurationError, RollstreamError, StateRefused, TopicError
from rollstream.topics.http_server import BoundServer, listen
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain",
}
_TEXTS = ("text/", "application/json", "image/svg")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class PageFiles:
    """The files below a folder. A file that changes is read again, so the page can be edited without a restart."""

    def __init__(self, folder: Path = PAGE) -> None:
        self._folder = folder.resolve()
        self._read: dict[Path, tuple[tuple[int, int], bytes, str]] = {}

    def answer(self, request: web.Request) -> web.Response:
        """Return the file that a path names, or 304 if the browser has it."""
        path = self.find(request.match_info.get("path", "") or "index.html")
        if path is None:
            raise web.HTTPNotFound(reason="the page has no such file")
        content, etag = self._content(path)
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]:
            return web.Response(status=304, headers=headers)
        kind = _TYPES[path.suffix]
        charset = "utf-8" if kind.startswith(_TEXTS) else None
        return web.Response(body=content, content_type=kind, charset=charset, headers=headers)

    def find(self, name: str) -> Path | None:
        """Return the file of a name; None if there is none, or if a part of the name is hidden or invalid."""
        parts = name.split("/")
        if not all(_SEGMENT.fullmatch(part) for part in parts):
            return None
        path = self._folder.joinpath(*parts)
        if path.suffix not in _TYPES or not path.is_file() or not path.resolve().is_relative_to(self._folder):
            return None
        return path

    def _content(self, path: Path) -> tuple[bytes, str]:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._read.get(path)
        if known is None or known[0] != stamp:
            content = path.read_bytes()
            known = (stamp, content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
            self._read[path] = known
        return known[1], known[2]


_MOST_QUERY = 4096
_MOST_BODY = 1 << 20
_MOST_LINE = 1 << 16
"""Maximum length of the request line and of each header; the parser refuses more and closes the connection."""
_CLOSE_S = 0.5
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """Serves the page of some runs; use it as an async context manager. `url` is its address once it listens."""

    def __init__(self, config: UiConfig, runs: Mapping[str, PageRun]) -> None:
        """Raises ConfigurationError if ui.token cannot be resolved."""
        self._config, self._runs = config, runs
        self._access = Access(config)
        self._files = PageFiles()
        self._closing = asyncio.Event()
        self._api = Api(runs, self._closing)
        self._server: BoundServer | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        """Listen. Raises ConfigurationError if that is not possible on the address."""
        self._server = await listen(
            [*self._api.routes(), web.get("/{path:.*}", self._file)],
            self._config.host,
            max(self._config.port, 0),
            name="page",
            setting="ui.port",
            max_body_bytes=_MOST_BODY,
            middlewares=[self._guard],
            prepare=lambda app: app.on_response_prepare.append(_add_headers),
            shutdown_timeout=_CLOSE_S,
            max_line_size=_MOST_LINE,
            max_field_size=_MOST_LINE,
        )
        for run in self._runs.values():
            run.start()
        self.url = self._access.url(self._server.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End the streams of events, and stop listening."""
        self._closing.set()
        if self._server:
            await self._server.close()
        await closed(list(self._runs.values()))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if self._access.token and "token" in request.query:
            # Redirect to an address without the token, because browsers show and remember addresses.
            response = web.Response(status=303, headers={"Location": "./", "Cache-Control": answers.NO_STORE})
            response.set_cookie(
                self._access.cookie,
                self._access.session,
                httponly=True,
                samesite="Strict",
                secure=request.secure,
                path="/",
            )
            return response
        return self._files.answer(request)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check(request)
            return await handler(request)
        except answers.UnusableParameter as error:
            return answers.refusal(400, error.error, error.remedy)
        except web.HTTPException as error:
            return answers.refusal(error.status, error.reason)
        except (TimeoutError, RollstreamError, sqlite3.Error) as error:
            return of_error(error, asks=request.method == "GET")
        except Exception as error:  # only this request fails; the server goes on
            event(logger, "request_failed", level=logging.ERROR, exc_info=error, path=request.path, error=repr(error))
            return answers.refusal(500, "this request failed; the server's log has the error")

    def _check(self, request: web.Request) -> None:
        """Raise an error if a request may not be answered."""
        if not self._access.knows_host(request.headers.get("Host", "")):
            raise web.HTTPMisdirectedRequest(reason="the request's host is not a name of this server; see ui.names")
        if len(request.rel_url.raw_query_string) > _MOST_QUERY:
            raise web.HTTPRequestURITooLong(reason=f"a query may have at most {_MOST_QUERY:,} characters")
        changes = request.method not in ("GET", "HEAD")
        if (changes or request.path.startswith("/api/")) and not self._access.is_own_page(request.headers):
            raise web.HTTPForbidden(reason="the request comes from a page of another origin")
        if changes and request.headers.get(CHANGE_HEADER) != "1":
            raise web.HTTPForbidden(reason=f"changes need the header {CHANGE_HEADER}: 1")
        if not self._may_ask(request):
            raise web.HTTPUnauthorized(reason="open the address that the server printed, with ?token=")

    def _may_ask(self, request: web.Request) -> bool:
        given = request.query.getall("token", [])
        if request.method == "GET" and not request.path.startswith("/api/") and given:
            return self._access.is_token(given[0])
        cookie = request.cookies.get(self._access.cookie, "")
        return self._access.admits(cookie, request.headers.get("Authorization", ""))


def of_error(error: Exception, *, asks: bool) -> web.Response:
    """Return the answer to a request that raised an expected kind of error; `asks` if it changes nothing."""
    if isinstance(error, ConfigurationError | TopicError):
        status = 400 if isinstance(error, ConfigurationError) else 404
        what, _, remedy = str(error).partition("; ")
        return answers.refusal(status, what, remedy)
    if isinstance(error, StateRefused):
        return answers.refusal(409, str(error), "check whether the run should be changed in this way")
    if not asks:
        return answers.refusal(503, str(error), "see whether the change was made before you ask for it again")
    if isinstance(error, sqlite3.Error):
        return answers.refusal(503, f"the index of the page: {error}", "the page asks again; see the server's log")
    return answers.refusal(503, str(error), "the page asks again; check whether the brokers answer")


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(answers.HEADERS)
    response.headers.pop("Server", None)
