"""Fills the index of a run on a thread, and gives it to those who query it as soon as it can be opened."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.ui.index.run_index import IndexProgress, RunIndex
from rollstream.topics.errors import RollstreamError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_POLL_S = 0.25
_EVERY_S = 1.0
_AGAIN_S = 5.0
"""Pause after an error of the brokers."""
_ENDING_S = 0.3


class IndexFilling:
    """The index of one run, and the thread that fills it."""

    def __init__(self, config: RunConfig, archive: str, moved: Callable[[], None]) -> None:
        """`moved` is called on the event loop when records were indexed, at most once a second."""
        self._config, self._archive, self._moved = config, archive, moved
        self._stop = threading.Event()
        self._opened = asyncio.Event()
        self._index: RunIndex | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._fill, name=f"index {config.run}", daemon=True)
        self.problem = ""
        self.progress = IndexProgress(0, 0)

    def start(self) -> None:
        """Begin, on behalf of the event loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait a moment for what is being written; what is cut off is read again."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_ENDING_S)

    @property
    def is_open(self) -> bool:
        """Whether the index can be queried."""
        return self._opened.is_set()

    async def opened(self, timeout_s: float) -> RunIndex:
        """Return the index once it can be queried. Raises TimeoutError with the reason."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
        except TimeoutError:
            raise TimeoutError(self.problem or "the index is not opened yet") from None
        assert self._index is not None, "it was announced"
        return self._index

    def _fill(self) -> None:
        while not self._stop.is_set():
            try:
                with RunIndex.open(self._config, self._archive) as index:
                    self._index, self.problem = index, ""
                    self._call(self._opened.set)
                    self._read(index)
            except RollstreamError as error:
                event(logger, "run_not_indexed", level=logging.WARNING, run=self._config.run, error=str(error))
                self.problem = str(error)
                self._call(self._opened.clear)
                self._stop.wait(_AGAIN_S)

    def _read(self, index: RunIndex) -> None:
        self.progress = index.progress()
        moved, due = True, 0.0
        while not self._stop.is_set():
            began = time.monotonic()
            if index.poll(_POLL_S):
                moved = True
            elif time.monotonic() - began < _POLL_S / 2:
                self._stop.wait(_POLL_S)  # another process fills it, or an archive has no more
            if moved and time.monotonic() >= due:
                moved, due = False, time.monotonic() + _EVERY_S
                self.progress = index.progress()
                self._call(self._moved)

    def _call(self, function: Callable[[], object]) -> None:
        assert self._loop is not None, "the thread was started"
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            self._stop.set()
