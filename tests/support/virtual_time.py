"""An event loop whose waits take no time: they advance a clock instead."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class AdvancingSelector(selectors.SelectSelector):
    """Advances a clock by each timeout instead of waiting for it."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now. A loop without a timeout waits for something that never happens."""
        assert timeout is not None, "the loop waits for ever"
        if timeout > 0:
            self._advance(timeout)
        return super().select(0)


class VirtualClock:
    """Stands for time.monotonic, which event loops read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that waits on this clock, which must be in the place of time.monotonic."""

        def advance(by_s: float) -> None:
            self.now_s += by_s

        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(AdvancingSelector(advance))) as runner:
            return runner.run(work)
