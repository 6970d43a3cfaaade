"""Ctrl-C ends a command within two seconds with one line, whatever the command is doing.

The main thread is interrupted, and so cleans up, as soon as it executes Python. A second thread ends the process if
that takes too long, for example because a client waits for a broker, a pipe is full, or a callback swallowed the
exception. This loses no data: the log survives kill -9 of every process. Standard library only, because this is the
first import.
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
"""Functions called before the process is ended by force, e.g. to kill children or to restore the terminal."""
_ACT_S = 0.3
"""How long to wait for each of these functions."""

_received: list[int] = []
_reporting = threading.RLock()
"""Held while the line is printed: no thread may end the process while another prints it. A signal handler may find it
held by its own thread, and then prints the line itself."""
_REPORT_S = 0.3
"""How long to wait for a thread that prints the line."""
_LINE = b"rollstream: interrupted\n"
_printed: list[bytes] = []


def take_over() -> None:
    """Handle SIGINT from here on; it still raises KeyboardInterrupt. Call once, before anything slow is imported."""
    signal.signal(signal.SIGINT, _interrupt)
    read, write = os.pipe()
    os.set_blocking(write, False)
    # The C handler writes at once, whatever the main thread does; a Python handler waits for the next bytecode.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    sys.unraisablehook = _report_unless_interrupted
    threading.Thread(target=_watch, args=(read,), name="interruption", daemon=True).start()


def never_raise() -> None:
    """From here on, Ctrl-C ends the process in the signal handler: an exception raised inside JAX may crash it."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, lambda _number, _frame: end())


def note() -> None:
    """Remember that Ctrl-C arrived; for handlers that replace ours and do not raise."""
    _received.append(signal.SIGINT)


def received() -> bool:
    """Whether Ctrl-C arrived."""
    return bool(_received)


def end() -> NoReturn:
    """Print the line and end the process, without waiting for threads and pipes."""
    note()
    _report()
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the signal interrupted a write
        sys.stdout.flush()  # if nobody reads the pipe, `_watch` ends the process
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
            break  # pressed twice
    for act in last_acts:
        acting = threading.Thread(target=act, daemon=True)
        acting.start()
        acting.join(_ACT_S)
    _report()
    os._exit(INTERRUPTED)


def _report() -> None:
    """Print one line to standard error, once, if that does not block; return when it is printed, by any thread."""
    if not _reporting.acquire(timeout=_REPORT_S):
        return
    try:
        if _printed:
            return
        error = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
        if select.select([], [error], [], 0)[1]:
            os.write(error, _LINE)
            _printed.append(_LINE)
    except (OSError, ValueError):
        pass  # no standard error
    finally:
        _reporting.release()


def _report_unless_interrupted(unraisable: Any) -> None:
    """Ignore KeyboardInterrupt in a callback after Ctrl-C: `_watch` prints the line and ends the process."""
    if not (_received and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)
