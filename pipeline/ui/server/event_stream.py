"""Server-sent events of a run: its overview when it moves, at most once a second, and from time to time in any case."""

import asyncio
from contextlib import suppress

from aiohttp import web

from rollstream.pipeline.ui.server.answers import NO_STORE, json_text
from rollstream.pipeline.ui.server.live_run import LiveRun

LEAST_S, MOST_S = 1.0, 15.0
"""Time between two overviews."""
_FIRST_S = 60.0


async def stream(request: web.Request, run: LiveRun, closing: asyncio.Event) -> web.StreamResponse:
    """Write events until the browser leaves or the server closes."""
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": NO_STORE, "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    moved = asyncio.Event()
    run.add_waiting(moved)
    writing = asyncio.ensure_future(_write(request, response, run, moved))
    ending = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait((writing, ending), return_when=asyncio.FIRST_COMPLETED)
        if writing.done() and not writing.cancelled():
            with suppress(ConnectionError):
                writing.result()
    finally:
        run.remove_waiting(moved)
        for task in (writing, ending):
            task.cancel()
    return response


async def _write(request: web.Request, response: web.StreamResponse, run: LiveRun, moved: asyncio.Event) -> None:
    await response.prepare(request)
    await response.write(b"retry: 2000\n\n")
    while True:
        moved.clear()
        with suppress(TimeoutError):  # told by an overview later, or by the API
            await _send(response, "overview", await run.overview(_FIRST_S))
        await asyncio.sleep(LEAST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_S - LEAST_S):
                await moved.wait()


async def _send(response: web.StreamResponse, name: str, value: object) -> None:
    # JSON on one line: a line break would end the datum.
    data = json_text(value).encode("utf-8", errors="replace")
    await response.write(b"event: " + name.encode() + b"\ndata: " + data + b"\n\n")
