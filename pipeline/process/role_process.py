"""The contract between a role's process and its supervisor: report readiness, stop on request, never be left behind.

The supervisor passes inherited files by number. The line "ready" on ROLLSTREAM_READY_FD means that the role is
ready; any other line reports progress of the start. End of file on ROLLSTREAM_LIFELINE_FD means that the supervisor is
gone, even by kill -9: the role ends, and so does whatever it started, unless another supervisor adopts it through the
list at ROLLSTREAM_REGISTRY. ROLLSTREAM_LISTEN_FD is a socket that listens at the role's address: the supervisor keeps
it while the role is started again, so that clients wait instead of being refused.
Without these files a role runs on its own.
"""

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from rollstream.infra.broker.process_identity import is_running
from rollstream.pipeline.process import interruption
from rollstream.pipeline.process.orphans import REGISTRY_VARIABLE, await_supervisor
from rollstream.topics.heartbeats import beat
from rollstream.topics.logs import event

if TYPE_CHECKING:
    import asyncio

READY_VARIABLE = "ROLLSTREAM_READY_FD"
LIFELINE_VARIABLE = "ROLLSTREAM_LIFELINE_FD"
LISTEN_VARIABLE = "ROLLSTREAM_LISTEN_FD"
ORPHAN_GRACE_S = 5.0
"""How long an orphan may take for a clean stop before it is killed."""
SUPERVISOR_LOST = 70
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a role that would end by itself, but was told to stop before its work was done."""
HURRY_S = 0.8
"""How long a role may drain after Ctrl-C; after SIGTERM its settings decide."""
_BEAT_S = 1.0
_LOOK_S = 0.5
"""Time between two checks of a supervisor that adopted this process."""
READY = b"ready\n"
"""Line that a process writes once it is ready."""

logger = logging.getLogger(__name__)
_reporting = threading.Lock()
"""Held while a thread writes to the pipe for readiness, so that no other closes it meanwhile."""


class RolePhase:
    """Whether a role starts, is ready, or drains after a request to stop."""

    def __init__(self) -> None:
        self.name: Literal["starting", "ready", "draining"] = "starting"

    def ready(self) -> None:
        """Note that the role takes work, unless it was asked to stop before."""
        if self.name == "starting":
            self.name = "ready"

    def drain(self) -> None:
        """Note that the role was asked to stop."""
        self.name = "draining"


PHASE = RolePhase()
"""The phase of this process."""


def watch_lifeline() -> None:
    """Stop this process once its supervisor is gone and no other adopts it: SIGTERM first, _exit after a grace period.
    At its end, whatever it started is killed, as the supervisor would. Call it before slow imports, and before exit
    handlers are registered that must run first."""
    number = os.environ.get(LIFELINE_VARIABLE)
    # Processes that this one starts must not inherit the variable, because they are not in the list.
    registry = os.environ.pop(REGISTRY_VARIABLE, "")
    if number is None:
        return
    lifeline = int(number)
    os.set_inheritable(lifeline, False)
    abandoned = threading.Event()

    def wait() -> None:
        while os.read(lifeline, 1):  # nothing is ever written: this returns at end of file
            pass
        event(logger, "supervisor_lost", level=logging.WARNING, grace_s=ORPHAN_GRACE_S)
        while registry and (supervisor := await_supervisor(Path(registry))) is not None:
            event(logger, "adopted", supervisor=supervisor.pid)
            while is_running(supervisor):
                time.sleep(_LOOK_S)
            event(logger, "supervisor_lost", level=logging.WARNING, grace_s=ORPHAN_GRACE_S)
        abandoned.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        _kill_own_group()
        os._exit(SUPERVISOR_LOST)

    @atexit.register
    def end_group() -> None:
        if abandoned.is_set():
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            _kill_own_group()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _kill_own_group() -> None:
    """SIGKILL this process and whatever it started, if it leads its process group, as every role of a supervisor."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def announce_ready(environment: Mapping[str, str] = os.environ) -> None:
    """Tell probes, and the supervisor if there is one, that this process is ready. Later calls do nothing."""
    PHASE.ready()
    beat()
    number = os.environ.pop(READY_VARIABLE, None) if environment is os.environ else environment.get(READY_VARIABLE)
    if number is None:
        return
    event(logger, "ready")
    with _reporting:
        os.set_blocking(int(number), True)
        with suppress(BrokenPipeError), os.fdopen(int(number), "wb") as pipe:  # the supervisor may be gone
            pipe.write(READY)


def announce_progress(what: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Report progress of the start to the supervisor, so that it goes on waiting; return whether there is a supervisor.

    A full pipe drops the line, because it must not block this process.
    """
    beat()
    with _reporting:
        number = environment.get(READY_VARIABLE)
        if number is None:
            return False
        os.set_blocking(int(number), False)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(int(number), what.replace("\n", " ").encode() + b"\n")
    return True


def inherited_listener() -> socket.socket | None:
    """Return the socket that the supervisor listens on for this role; None if there is none, or it was returned
    before."""
    number = os.environ.pop(LISTEN_VARIABLE, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    return socket.socket(fileno=int(number))


def stop_on_signals(stop: threading.Event | None = None) -> threading.Event:
    """Return an event (`stop` or a new one) that SIGTERM and SIGINT set. After SIGINT the role has HURRY_S to stop."""
    stop = stop or threading.Event()

    def receive(number: int, _frame: FrameType | None) -> None:
        PHASE.drain()
        if number == signal.SIGINT:
            interruption.note()
        stop.set()

    signal.signal(signal.SIGTERM, receive)
    signal.signal(signal.SIGINT, receive)
    return stop


def run_until_stopped(work: "Callable[[asyncio.Event], Coroutine[Any, Any, object]]") -> None:
    """Run the coroutine of a role with an event that SIGTERM and SIGINT set.

    After SIGINT the coroutine is cancelled if it has not ended within HURRY_S. The loop's signal handlers are not used,
    because they would replace the handler that ends a hanging process.
    """
    import asyncio  # imported here because it would take half the time of --help

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        working = asyncio.ensure_future(work(stop))
        turning = asyncio.ensure_future(_beat_with_the_loop())

        def begin(number: int) -> None:
            stop.set()
            if number == signal.SIGINT:
                loop.call_later(HURRY_S, working.cancel)

        def receive(number: int, _frame: FrameType | None) -> None:
            PHASE.drain()
            if number == signal.SIGINT:
                interruption.note()
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(begin, number)

        signal.signal(signal.SIGTERM, receive)
        signal.signal(signal.SIGINT, receive)
        try:
            await working
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
        finally:
            turning.cancel()

    asyncio.run(main())


async def _beat_with_the_loop() -> None:
    import asyncio

    while True:
        beat("event loop")
        await asyncio.sleep(_BEAT_S)


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived; `signal_number` says which."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


def in_a_hurry(error: BaseException | None) -> bool:
    """Whether `error` is due to Ctrl-C, after which a role has HURRY_S to stop; after SIGTERM its settings decide."""
    return isinstance(error, KeyboardInterrupt) and getattr(error, "signal_number", signal.SIGINT) == signal.SIGINT


class Interrupts:
    """Signal handling of a supervisor: the first signal raises Interrupted at the next safe point.

    A further SIGINT, or the end of the grace period after the first, calls `kill_now`, which must not return while
    child processes remain; the process then exits at once.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._deferrals = 0
        self._raised = False
        self.kill_now: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP for the rest of the process; an ignored SIGHUP stays ignored."""
        interruption.last_acts.append(lambda: self.kill_now())
        signal.signal(signal.SIGINT, self._receive)
        signal.signal(signal.SIGTERM, self._receive)
        # `nohup` ignores SIGHUP, so that the run outlives the terminal.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._receive)

    @contextmanager
    def deferred(self, *, raises: bool = True) -> Iterator[None]:
        """Return a context within which no interrupt is raised. An interrupt that arrives is raised at the end, unless
        `raises` is false."""
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals -= 1
        if raises:
            self._raise_once()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        PHASE.drain()
        self._received.append(number)
        if number == signal.SIGINT:
            interruption.note()
        if len(self._received) > 1 and number == signal.SIGINT:
            self.kill_now()
            interruption.end()
        self._raise_once()

    def _raise_once(self) -> None:
        if self._received and not self._raised and not self._deferrals:
            self._raised = True
            raise Interrupted(self._received[0])
