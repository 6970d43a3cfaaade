"""Progress of a start that computes for long: a compiler reports nothing while it works."""

import threading
import time
from collections.abc import Callable

from rollstream.pipeline.run.role_process import announce_progress
from rollstream.topics.closing import Closing

_EVERY_S = 10.0
_LEAST_SHARE = 0.02
"""Processor time, as a share of the time that passed, from which on a process computes; one that waits uses less."""


class BusyProgress(Closing):
    """Reports progress, and repeats the last report every `every_s` seconds in which this process computed.

    A process that waits for something uses no processor time, so its supervisor still notices its silence.
    """

    def __init__(
        self,
        report: Callable[[str], object] = announce_progress,
        *,
        every_s: float = _EVERY_S,
        processor_s: Callable[[], float] = time.process_time,
    ) -> None:
        """Start a thread that looks every `every_s` seconds at the seconds of processor time used so far."""
        self._report, self._every_s, self._processor_s = report, every_s, processor_s
        self._last = "starting"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="busy progress", daemon=True)
        self._thread.start()

    def __call__(self, what: str) -> None:
        """Report progress."""
        self._last = what
        self._report(what)

    def close(self) -> None:
        """End the repetition; call this before the process reports that it is ready, which closes the pipe."""
        self._closed.set()
        self._thread.join()

    def _repeat(self) -> None:
        start = used = self._processor_s()
        while not self._closed.wait(self._every_s):
            before, used = used, self._processor_s()
            if used - before >= _LEAST_SHARE * self._every_s:
                self._report(f"{self._last}, {used - start:.0f} s of processor time so far")
