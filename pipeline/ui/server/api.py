"""The API of the page: the function that answers each path. docs/page.md describes the contract.

Of server-sent events, the overview is sent when a run has changed, at most once a second and at least every 14 seconds;
a request to update views is sent when its index has changed.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from rollstream.pipeline.index import group_query, rollout_query, series
from rollstream.pipeline.index.evaluations import VERSIONS, evaluations
from rollstream.pipeline.index.group_query import GroupFilter
from rollstream.pipeline.index.rollout_query import RolloutFilter
from rollstream.pipeline.run_settings import changed_settings
from rollstream.pipeline.ui.server import ledger_keeper, session_list
from rollstream.pipeline.ui.server import parameters as given
from rollstream.pipeline.ui.server.answers import NO_STORE, UnusableParameter, answer, json_text
from rollstream.pipeline.ui.server.page_run import PageRun

LEAST_S, MOST_S = 1.0, 14.0
"""Shortest and longest time between two overviews."""


async def stream(
    request: web.Request, runs: Mapping[str, PageRun | None], closing: asyncio.Event
) -> web.StreamResponse:
    """Write events until the browser leaves or the server closes.

    `runs` are the requested runs by name, None for one that this server does not have. The other runs of a page must
    not lose their events because of it, so it is an event, too.
    """
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": NO_STORE, "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    writers: list[asyncio.Future[None]] = []
    ending = asyncio.ensure_future(closing.wait())
    try:
        with suppress(ConnectionError):  # The browser has left.
            await response.prepare(request)
            await response.write(b"retry: 2000\n\n")
            writers = [asyncio.ensure_future(_write(response, name, run)) for name, run in runs.items()]
            writing = asyncio.gather(*writers)
            await asyncio.wait((writing, ending), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
    finally:
        # Each of them, because one that fails ends only `writing`, and the others would go on.
        for writer in writers:
            writer.cancel()
        ending.cancel()
    return response


async def _write(response: web.StreamResponse, name: str, run: PageRun | None) -> None:
    if run is None:
        await _send(response, "unknown", name, None)
        return
    moved = asyncio.Event()
    run.live.add_waiting(moved)
    try:
        await _write_changes(response, name, run, moved)
    finally:
        run.live.remove_waiting(moved)


async def _write_changes(response: web.StreamResponse, name: str, run: PageRun, moved: asyncio.Event) -> None:
    indexed = run.live.indexed
    while True:
        moved.clear()
        with suppress(TimeoutError):  # the brokers do not answer; answers of the API report it
            await _send(response, "overview", name, await run.overview())
        if run.live.indexed != indexed:
            indexed = run.live.indexed
            await _send(response, "changed", name, run.live.counts)
        await asyncio.sleep(LEAST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_S - LEAST_S):
                await moved.wait()


async def _send(response: web.StreamResponse, event: str, run: str, value: object) -> None:
    # JSON is on one line, because a line break would end the data field.
    data = json_text({"run": run, "value": value}).encode("utf-8", errors="replace")
    await response.write(b"event: " + event.encode() + b"\ndata: " + data + b"\n\n")


_POINTS, _MOST_POINTS = 600, 10_000
_MOST_SKIPPED = 10**12
_BINS, _MOST_BINS = 20, 200
_BUCKETS, _MOST_BUCKETS = 120, 2000
_MOST_VERSIONS = 200
_SHOWN_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Types that a browser draws and in which nothing runs."""
ORDERS = ("newest", "oldest", "reward", "length", "advantage")


class Api:
    """Handlers of the paths below /api/."""

    def __init__(self, runs: Mapping[str, PageRun], closing: asyncio.Event) -> None:
        """`closing` is set when streams of events must end."""
        self._runs, self._closing = runs, closing

    def routes(self) -> list[web.RouteDef]:
        """Return every route; a path without a route is also answered with an error in JSON."""
        run = "/api/runs/{run}"
        return [
            web.get("/api/runs", self._list),
            web.get("/api/events", self._events),
            web.get(f"{run}/overview", self._overview),
            web.get(f"{run}/settings", self._settings),
            web.get(f"{run}/series", self._series),
            web.get(f"{run}/evaluations", self._evaluations),
            web.get(f"{run}/rollouts", self._rollouts),
            web.get(f"{run}/facets", self._facets),
            web.get(f"{run}/rollouts/{{partition}}/{{offset}}", self._details),
            web.get(f"{run}/rollouts/{{partition}}/{{offset}}/estimators", self._estimators),
            web.get(f"{run}/rollouts/{{partition}}/{{offset}}/media/{{number:[0-9]{{1,3}}}}", self._medium),
            web.get(f"{run}/groups", self._groups),
            web.get(f"{run}/spread", self._spread),
            web.get(f"{run}/drops", self._drops),
            web.get(f"{run}/weights", self._weights),
            web.get(f"{run}/ledger", self._ledger),
            web.get(f"{run}/ledger/offsets", self._offsets),
            web.get(f"{run}/sessions", self._sessions),
            web.get(f"{run}/sessions/{{session}}", self._session),
            web.get(f"{run}/dead-letters", self._letters),
            web.post(f"{run}/dead-letters/redrive", self._redrive),
            web.get(f"{run}/mixture", self._mixture),
            web.get(f"{run}/commands", self._wanted),
            web.post(f"{run}/commands", self._command),
            web.route("*", "/api/{path:.*}", self._unknown),
        ]

    def _run(self, request: web.Request, *, live: bool = False) -> PageRun:
        """Return the run that a path names. With `live`, refuse a run of an archive, which lacks the requested data."""
        name = request.match_info["run"]
        if name not in self._runs:
            raise web.HTTPNotFound(reason="this server has no such run; /api/runs lists its runs")
        run = self._runs[name]
        if live and run.source != "topics":
            raise web.HTTPNotFound(
                reason="an archive does not have this data; `rollstream restore` makes the archive a run again"
            )
        return run

    async def _list(self, _request: web.Request) -> web.Response:
        runs = [
            {"run": run.name, "source": run.source, "learners": await run.learners()} for run in self._runs.values()
        ]
        return answer({"runs": runs})

    async def _overview(self, request: web.Request) -> web.Response:
        return answer(await self._run(request).overview())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        names = request.query.getall("run", [])
        if not names:
            raise UnusableParameter("no run is named", "name at least one, as in /api/events?run=NAME")
        return await stream(request, {name: self._runs.get(name) for name in names}, self._closing)

    async def _settings(self, request: web.Request) -> web.Response:
        run = self._run(request)
        changed = await run.compute(lambda: changed_settings(run.config))
        return answer({"known": changed is not None, "changed": [each._asdict() for each in changed or ()]})

    async def _series(self, request: web.Request) -> web.Response:
        query = request.query
        learner, names = given.text(query, "learner"), [n for n in query.get("names", "").split(",") if n]
        points = given.within(query, "points", _POINTS, _MOST_POINTS)
        return answer(await self._run(request).ask(lambda index: series.series(index.db, learner, names, points)))

    async def _evaluations(self, request: web.Request) -> web.Response:
        learner = given.text(request.query, "learner")
        versions = given.within(request.query, "versions", VERSIONS, _MOST_VERSIONS)
        return answer(await self._run(request).ask(lambda index: evaluations(index.db, learner, versions)))

    async def _rollouts(self, request: web.Request) -> web.Response:
        query = request.query
        wanted, order = rollout_filter(query), given.choice(query, "order", ORDERS)
        after, limit = given.text(query, "after"), given.within(query, "limit", given.LIMIT, given.MOST)
        run = self._run(request)
        skip = given.within(query, "skip", 0, _MOST_SKIPPED, least=0)
        return answer(await run.ask(lambda index: rollout_query.page(index.db, wanted, order, after, limit, skip)))

    async def _facets(self, request: web.Request) -> web.Response:
        return answer(await self._run(request).ask(lambda index: rollout_query.facets(index.db)))

    async def _details(self, request: web.Request) -> web.Response:
        place = given.place(request.match_info["partition"], request.match_info["offset"])
        begin = given.integer(request.query, "tokens_from") or 0
        return answer(await self._run(request).details(place, begin))

    async def _estimators(self, request: web.Request) -> web.Response:
        place = given.place(request.match_info["partition"], request.match_info["offset"])
        return answer(await self._run(request).ask(lambda index: group_query.estimators(index.db, place)))

    async def _medium(self, request: web.Request) -> web.Response:
        place = given.place(request.match_info["partition"], request.match_info["offset"])
        number = int(request.match_info["number"])
        medium = await self._run(request).ask(lambda index: index.medium(place, number))
        if medium.media_type not in _SHOWN_IMAGES:
            raise web.HTTPUnsupportedMediaType(reason="the page shows PNG, JPEG, GIF and WebP")
        return web.Response(body=medium.data, content_type=medium.media_type, headers={"Cache-Control": NO_STORE})

    async def _groups(self, request: web.Request) -> web.Response:
        query = request.query
        flat = given.flag(query, "zero_variance")
        wanted = GroupFilter(environment=given.text(query, "environment"), zero_variance=flat)
        order = given.choice(query, "order", ("newest", "spread"))
        after, limit = given.text(query, "after"), given.within(query, "limit", given.LIMIT, given.MOST)
        run = self._run(request)
        return answer(await run.ask(lambda index: group_query.page(index.db, wanted, order, after, limit)))

    async def _spread(self, request: web.Request) -> web.Response:
        bins = given.within(request.query, "bins", _BINS, _MOST_BINS)
        return answer(await self._run(request).ask(lambda index: group_query.spread(index.db, bins)))

    async def _drops(self, request: web.Request) -> web.Response:
        buckets = given.within(request.query, "buckets", _BUCKETS, _MOST_BUCKETS)
        return answer(await self._run(request).ask(lambda index: series.drops(index.db, buckets)))

    async def _weights(self, request: web.Request) -> web.Response:
        return answer(await self._run(request).ask(lambda index: series.weights(index.db)))

    async def _ledger(self, request: web.Request) -> web.Response:
        return answer(self._run(request, live=True).ledger.answer())

    async def _offsets(self, request: web.Request) -> web.Response:
        run, query = self._run(request, live=True), request.query
        fate, reason = given.choice(query, "fate", ledger_keeper.FATES), given.text(query, "reason")
        ranges = await run.offsets(fate, reason)
        names = [f"{each.partition}:{each.first}-{each.last}" for each in ranges]
        shown, following = given.page_of(names, names, query, ledger_keeper.place_of)
        total = sum(each.last - each.first + 1 for each in ranges)
        return answer({"ranges": shown, "next": following, "total": total})

    async def _sessions(self, request: web.Request) -> web.Response:
        run, query = self._run(request, live=True), request.query
        state = given.choice(query, "state", ("", *session_list.STATES))
        sessions = await run.sessions.get()
        chosen = {name: row for name, row in sessions.rows.items() if not state or row["state"] == state}
        shown, following = given.page_of([*chosen.values()], [*chosen], query, sessions.place)
        return answer({"rows": shown, "next": following, "total": len(chosen)})

    async def _session(self, request: web.Request) -> web.Response:
        return answer(await self._run(request, live=True).session(request.match_info["session"]))

    async def _letters(self, request: web.Request) -> web.Response:
        letters = await self._run(request, live=True).letters.get()
        shown, following = given.page_of(letters, [row["place"] for row in letters], request.query)
        return answer({"rows": shown, "next": following, "total": len(letters)})

    async def _redrive(self, request: web.Request) -> web.Response:
        run, body = self._run(request, live=True), await _object(request)
        return answer(await run.redrive(body.get("places")))

    async def _mixture(self, request: web.Request) -> web.Response:
        return answer(await self._run(request, live=True).mixture.get())

    async def _wanted(self, request: web.Request) -> web.Response:
        return answer({"state": await self._run(request, live=True).wanted()})

    async def _command(self, request: web.Request) -> web.Response:
        run = self._run(request, live=True)
        sentence = await run.command(await _object(request))
        return answer({"recorded": True} | ({"said": sentence} if sentence else {}))

    async def _unknown(self, _request: web.Request) -> web.Response:
        raise web.HTTPNotFound(reason="the API has no such path")


def rollout_filter(query: Mapping[str, str]) -> RolloutFilter:
    """Return the conditions on rollouts that a query contains."""
    texts = ("environment", "worker", "fate", "reason", "example", "group", "batch", "uid", "text")
    numbers = ("version", "version_min", "version_max", "step")
    conditions: dict[str, Any] = {name: given.text(query, name) for name in texts}
    conditions |= {name: given.integer(query, name) for name in numbers}
    conditions |= {name: given.number(query, name) for name in ("reward_min", "reward_max")}
    return RolloutFilter(**conditions)


async def _object(request: web.Request) -> dict[str, Any]:
    """Return the body of a request, which must be a JSON object."""
    try:
        body = json.loads(await request.read() or b"null")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UnusableParameter("the body is not a JSON object", 'send an object such as {"places": ["0:3"]}')
    return body
