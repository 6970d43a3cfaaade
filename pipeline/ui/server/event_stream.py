"""Server-sent events of a run. The overview is sent when the run has changed, at most once a second and at least every
14 seconds; a request to update views is sent when the index has changed."""

import asyncio
from contextlib import suppress

from aiohttp import web

from rollstream.pipeline.ui.server.answers import NO_STORE, json_text
from rollstream.pipeline.ui.server.page_run import PageRun

LEAST_S, MOST_S = 1.0, 14.0
"""Shortest and longest time between two overviews."""


async def stream(request: web.Request, run: PageRun, closing: asyncio.Event) -> web.StreamResponse:
    """Write events until the browser leaves or the server closes."""
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": NO_STORE, "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    moved = asyncio.Event()
    run.live.add_waiting(moved)
    writing = asyncio.ensure_future(_write(request, response, run, moved))
    ending = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait((writing, ending), return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            with suppress(ConnectionError):
                writing.result()
    finally:
        run.live.remove_waiting(moved)
        for task in (writing, ending):
            task.cancel()
    return response


async def _write(request: web.Request, response: web.StreamResponse, run: PageRun, moved: asyncio.Event) -> None:
    await response.prepare(request)
    await response.write(b"retry: 2000\n\n")
    indexed = run.live.indexed
    while True:
        moved.clear()
        with suppress(TimeoutError):  # the brokers do not answer; answers of the API report it
            await _send(response, "overview", await run.overview())
        if run.live.indexed != indexed:
            indexed = run.live.indexed
            await _send(response, "changed", run.live.counts)
        await asyncio.sleep(LEAST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_S - LEAST_S):
                await moved.wait()


async def _send(response: web.StreamResponse, name: str, value: object) -> None:
    # JSON is on one line, because a line break would end the data field.
    data = json_text(value).encode("utf-8", errors="replace")
    await response.write(b"event: " + name.encode() + b"\ndata: " + data + b"\n\n")
