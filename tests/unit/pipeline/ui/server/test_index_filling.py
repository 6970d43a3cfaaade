"""The thread that follows the process that fills an index goes on when this process cannot be started."""

import asyncio
import threading

import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import filling_process
from rollstream.pipeline.ui.server import index_filling
from rollstream.pipeline.ui.server.index_filling import IndexFilling


def test_a_process_that_cannot_be_started_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again, problems = threading.Event(), list[str]()

    def start(*_: object) -> None:
        problems.append(filling.problem)
        if len(problems) > 1:
            again.set()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def follow() -> None:
        filling.start()
        assert await asyncio.to_thread(again.wait, 60)
        filling.close()

    monkeypatch.setattr(filling_process, "start", start)
    monkeypatch.setattr(index_filling, "AGAIN_S", 0.01)
    filling = IndexFilling(RunConfig(), "", lambda: None)
    asyncio.run(follow())
    assert problems[1] == "the process that fills the index was lost, and is started again"
