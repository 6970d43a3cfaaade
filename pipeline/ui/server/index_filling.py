"""Starts the process that fills the index of a run, and opens the index for queries as soon as that is possible."""

import asyncio
import logging
from collections.abc import Callable
from multiprocessing.connection import Connection

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import filling_process
from rollstream.pipeline.index.filling_process import Filled
from rollstream.pipeline.index.run_index import IndexProgress, RunIndex
from rollstream.pipeline.ui.server.background import FollowingThread
from rollstream.topics.errors import RollstreamError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_LOOK_S = 0.1
AGAIN_S = 5.0
"""Pause before a process that was lost is started again."""
_ENDING_S = 0.5


class IndexFilling(FollowingThread):
    """The index of one run, the process that fills it, and the thread that follows this process."""

    def __init__(self, config: RunConfig, archive: str, moved: Callable[[], None]) -> None:
        """`moved` is called on the event loop when records were indexed, at most once a second."""
        super().__init__(f"index {config.run}", self._fill)
        self._config, self._archive, self._moved = config, archive, moved
        self._opened = asyncio.Event()
        self._index: RunIndex | None = None
        self.problem = ""
        self.progress = IndexProgress(0, 0)

    def close(self) -> None:
        """Stop, and end the process; records that it has not committed are read again by the next process."""
        super().close()
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
                self._fill_apart()
            except (EOFError, OSError) as error:
                if not self._stop.is_set():
                    self.problem = "the process that fills the index was lost, and is started again"
                    event(logger, "index_process_lost", level=logging.WARNING, run=self._config.run, error=repr(error))
                    self._stop.wait(AGAIN_S)

        if self._index is not None:
            self._index.close()

    def _fill_apart(self) -> None:
        """Start the process, and follow it until this server ends. Raises EOFError or OSError if the process ends or
        cannot be started."""
        pipe, process = filling_process.start(self._config, self._archive)
        try:
            self._follow(pipe)
        finally:
            process.kill()
            process.join()

    def _follow(self, pipe: Connection) -> None:
        """Receive the reports of the process until the process or this server ends."""
        opened = False
        while not self._stop.is_set():
            if not pipe.poll(_LOOK_S):
                continue
            filled: Filled = pipe.recv()
            self.problem = filled.problem
            if filled.progress is None:
                opened = False
                self._call(self._opened.clear)
                continue
            if not opened:
                opened = self._open()
            self.progress = filled.progress
            self._call(self._moved)

    def _open(self) -> bool:
        """Open the index that the process has created; return whether that succeeded."""
        try:
            index = RunIndex.open(self._config, self._archive, fills=False)
        except RollstreamError as error:
            self.problem = str(error)
            return False
        before, self._index = self._index, index
        if before is not None:
            before.close()
        self._call(self._opened.set)
        return True
