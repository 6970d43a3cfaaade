"""Ctrl-C ends a command within two seconds with one line, whatever the command is doing.

The main thread is interrupted, and so cleans up, as soon as it executes Python. A thread of its own ends the process
where that takes too long: while a client waits for a broker, a pipe is full, or the exception was lost in a callback.
Nothing is lost by that: the log survives a kill -9 of everything. Standard library only: this is the first import.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

GRACE_S = 1.5
"""How long the main thread may take to clean up."""
INTERRUPTED = 128 + signal.SIGINT

last_acts: list[Callable[[], None]] = []
"""Called before the process is ended by force: what must not outlive it, or must be given back."""
_ACT_S = 0.3
"""How long one of them is waited for."""

_received: list[int] = []
_said = threading.Lock()


def take_over() -> None:
    """Answer for SIGINT from here on. Called once, before anything slow is imported."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    # Written by the C handler at once, whatever the main thread does; a handler in Python waits for its next bytecode.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _report_unless_interrupted
    threading.Thread(target=_watch, args=(read,), name="interruption", daemon=True).start()


def never_raise() -> None:
    """End the process at the signal itself from here on: with JAX below, an exception out of nowhere may crash it."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, lambda _number, _frame: end())


def note() -> None:
    """Remember that Ctrl-C came; for a handler that takes the place of ours and raises nothing."""
    _received.append(signal.SIGINT)


def received() -> bool:
    """Whether Ctrl-C came."""
    return bool(_received)


def end() -> NoReturn:
    """Say the line and end the process, without what waits for threads and pipes at exit."""
    note()
    _say()
    with suppress(OSError, ValueError, RuntimeError):  # the last where a signal met a write
        sys.stdout.flush()  # `_watch` ends a wait for a reader that is not there
    os._exit(INTERRUPTED)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    if not _received:
        note()
        raise KeyboardInterrupt


def _watch(read: int) -> None:
    while signal.SIGINT not in os.read(read, 64):
        pass  # another signal
    deadline = time.monotonic() + GRACE_S
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([read], [], [], left)
        if ready and signal.SIGINT in os.read(read, 64):
            break  # asked twice
    for act in last_acts:
        acting = threading.Thread(target=act, daemon=True)
        acting.start()
        acting.join(_ACT_S)
    _say()
    os._exit(INTERRUPTED)


def _say() -> None:
    """One line on standard error, once, where somebody can take it now."""
    if not _said.acquire(blocking=False):
        return
    with suppress(OSError, ValueError):
        error = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
        if select.select([], [error], [], 0)[1]:
            os.write(error, b"rollstream: interrupted\n")


def _report_unless_interrupted(unraisable: Any) -> None:
    """Without a word where Ctrl-C met a callback: the interruption is said in one line, and the watch ends us."""
    if not (_received and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)
