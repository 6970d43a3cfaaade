"""The API of the page: which function answers a path, and what it answers."""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from rollstream.pipeline.ui.server.answers import answer
from rollstream.pipeline.ui.server.event_stream import stream
from rollstream.pipeline.ui.server.live_run import LiveRun

_PATIENCE_S = 20.0
"""How long a request waits for what is not read yet."""


class Api:
    """Handlers of the paths below /api/."""

    def __init__(self, runs: Mapping[str, LiveRun], closing: asyncio.Event) -> None:
        """`closing` is set when streams of events must end."""
        self._runs, self._closing = runs, closing

    def routes(self) -> list[web.RouteDef]:
        run = "/api/runs/{run}"
        return [
            web.get("/api/runs", self._list),
            web.get(f"{run}/overview", self._overview),
            web.get(f"{run}/events", self._events),
            web.route("*", "/api/{path:.*}", self._unknown),
        ]

    def _run(self, request: web.Request) -> LiveRun:
        name = request.match_info["run"]
        if name not in self._runs:
            raise web.HTTPNotFound(reason="this server has no such run; /api/runs lists those it has")
        return self._runs[name]

    async def _list(self, _request: web.Request) -> web.Response:
        runs = [{"run": run.name, "source": run.source, "learners": []} for run in self._runs.values()]
        return answer({"runs": runs})

    async def _overview(self, request: web.Request) -> web.Response:
        return answer(await self._run(request).overview(_PATIENCE_S))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await stream(request, self._run(request), self._closing)

    async def _unknown(self, _request: web.Request) -> web.Response:
        raise web.HTTPNotFound(reason="the API has no such path")
