"""Live output of a demo or a run: a line for each event and, on a terminal, a live frame below them.

Without a terminal it prints lines only, and one every few seconds shows progress.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.tools.top import frame

_FRAME_S = 0.5
_LINE_S = 2.0
Line = Callable[[RunObserver], str]


class Display:
    """Prints to standard output, or to standard error if standard output carries JSON."""

    def __init__(
        self, *, json: bool, began: float, newest: int, line: Line | None = None, every_s: float = _LINE_S
    ) -> None:
        """`line` formats progress where there is no terminal, every `every_s` seconds."""
        self._stream = sys.stderr if json else sys.stdout
        self._began = began
        self._newest = newest
        self._line = line or self._learning
        self._line_s = every_s
        self._console = Console(file=self._stream) if self._stream.isatty() else None
        self._live: Live | None = None
        self._due = 0.0

    def say(self, line: str) -> None:
        """Print an event, with the seconds since the start."""
        text = f"{time.monotonic() - self._began:6.1f} s  {line}"
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Within this context `show` draws the run below the lines, if there is a terminal."""
        self._due = time.monotonic() + (_FRAME_S if self._console else self._line_s)
        if self._console is None:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def show(self, observer: RunObserver) -> None:
        """Show progress, unless it was shown a moment ago."""
        if time.monotonic() < self._due:
            return
        if self._live is not None and self._console is not None:
            self._due = time.monotonic() + _FRAME_S
            self._live.update(frame(observer.snapshot(self._newest), self._console.width), refresh=True)
            return
        self._due += self._line_s
        self.say(self._line(observer))

    def _learning(self, observer: RunObserver) -> str:
        recent = observer.last(self._newest)
        return (
            f"step {observer.steps:4d}   rollouts {len(observer.scored):7,}   batches {observer.batches:5,}   "
            f"reward {recent.reward:.3f}   exact {recent.exact:.3f}"
        )

    def restore(self) -> None:
        """Restore the terminal's cursor, for a process that is about to end at once."""
        if self._live is not None and self._console is not None:
            self._console.show_cursor(True)
