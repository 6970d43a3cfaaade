"""Server-sent events of runs. The overview is sent when a run has changed, at most once a second and at least every
14 seconds; a request to update views is sent when its index has changed."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import web

from rollstream.pipeline.ui.server.answers import NO_STORE, json_text
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
