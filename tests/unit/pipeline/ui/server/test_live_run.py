"""The page keeps the state of a run that it has, while the run is read again after an error."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.run_statistics import RunSnapshot
from rollstream.pipeline.ui.server import live_run
from rollstream.pipeline.ui.server.live_run import LiveRun
from rollstream.topics.errors import BrokerUnavailable


class Observations:
    """An observer that gives snapshots of a run, as numbers of rollouts and of offsets left, and then fails."""

    def __init__(self, snapshots: list[tuple[int, int]], look: Callable[[], object]) -> None:
        self._snapshots, self._look = snapshots, look

    def poll(self, timeout_s: float) -> bool:
        del timeout_s
        self._look()
        if not self._snapshots:
            raise BrokerUnavailable("the brokers went away")
        return True

    def snapshot(self, keep: int) -> RunSnapshot:
        del keep
        produced, left = self._snapshots.pop(0)
        return RunSnapshot(run="r", produced=produced, history=10, history_left=left)

    def close(self) -> None:
        pass


def test_a_run_that_is_read_again_keeps_its_figures_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, shown = threading.Event(), list[int | None]()
    readings = [[(4, 6), (10, 0)], [(1, 9), (5, 5)], [(2, 8), (11, 0)]]
    live = LiveRun(RunConfig())

    def observer(*_: object, **__: object) -> Observations:
        if not readings:
            ended.set()
        return Observations(readings.pop(0) if readings else [], lambda: shown.append(live.counts.get("rollouts")))

    async def follow() -> None:
        live.start()
        assert await asyncio.to_thread(ended.wait, 60)
        live.close()

    monkeypatch.setattr(live_run, "EVERY_S", 0.0)
    monkeypatch.setattr(live_run, "AGAIN_S", 0.0)
    monkeypatch.setattr(live_run, "RunObserver", observer)
    monkeypatch.setattr(live_run.topic_admin, "bounds", lambda *_: {})
    asyncio.run(follow())
    assert shown[:9] == [None, 4, 10, 10, 10, 10, 10, 10, 11]
