"""Live output of a demo or a run: a line for each event and, on a terminal, a live frame below them.

Without a terminal it prints only lines; every few seconds, a line shows progress.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

_FRAME_S = 0.5
_LINE_S = 2.0
T = TypeVar("T")


class Display(Generic[T]):
    """Prints to standard output, or to standard error if standard output carries JSON. `show` gets values of type T."""

    def __init__(
        self,
        *,
        json: bool,
        began: float,
        line: Callable[[T], str],
        frame: Callable[[T, int], RenderableType],
        every_s: float = _LINE_S,
    ) -> None:
        """`line` formats progress without a terminal, every `every_s` seconds; `frame` draws it at the given width."""
        self.json = json
        self._stream = sys.stderr if json else sys.stdout
        self._began = began
        self._line, self._frame = line, frame
        self._line_s = every_s
        self._console = Console(file=self._stream) if self._stream.isatty() else None
        self._live: Live | None = None
        self._due = 0.0

    @property
    def on_terminal(self) -> bool:
        """Whether `show` draws frames."""
        return self._console is not None

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

    def show(self, shown: T) -> None:
        """Show progress, unless it was shown a moment ago."""
        if time.monotonic() < self._due:
            return
        if self._live is not None and self._console is not None:
            self._due = time.monotonic() + _FRAME_S
            self._live.update(self._frame(shown, self._console.width), refresh=True)
            return
        self._due += self._line_s
        self.say(self._line(shown))

    def restore(self) -> None:
        """Restore the terminal's cursor, for a process that is about to end at once."""
        if self._live is not None and self._console is not None:
            self._console.show_cursor(True)
