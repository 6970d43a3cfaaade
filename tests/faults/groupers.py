"""Grouping processes of fault tests: started, waited for, and started again where they say that they must be."""

import signal
import subprocess
from collections.abc import Mapping, Sequence

from tests.faults.conftest import SESSION_S
from tests.faults.promises import stop
from tests.support.runs import RealRun
from tests.support.waiting import eventually

TRANSACTION_S = 30.0
"""Long enough for an answer on a busy machine: who hears nothing of whether it was replaced ends, but does not know."""


def grouper(
    run: RealRun, ordinal: int, settings: Mapping[str, object] | None = None, **kafka: object
) -> subprocess.Popen[bytes]:
    """Start a grouper; `settings` are settings other than those of its clients, with __ for the dot."""
    values = {"session_timeout_s": SESSION_S, "transaction_timeout_s": TRANSACTION_S, **kafka}
    of_clients = {f"kafka__{name}": value for name, value in values.items()}
    return run.start("group", f"--ordinal={ordinal}", **{**of_clients, **(settings or {})})


def await_logged(run: RealRun, process: subprocess.Popen[bytes], text: str, timeout_s: float = 60.0) -> None:
    """Wait until a process has logged something; fails at once if it ends without logging it."""

    def said() -> bool:
        return text in run.log_of(process)

    eventually(lambda: said() or process.poll() is not None, timeout_s, f"{text} in the log of process {process.pid}")
    assert said(), f"process {process.pid} ended (exit {process.returncode}) and never logged {text}"


def await_restored(run: RealRun, *processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        await_logged(run, process, '"event": "task_restored"')


class Supervised:
    """Groupers with nearly the default timeouts; one that says that it must be started again is started again.

    On most machines a broker restarts within these timeouts. If it does not, a transaction outlives its timeout, and
    its owner cannot tell this from another process taking over, or hears nothing at all. It says so and ends.
    """

    def __init__(self, run: RealRun, ordinals: Sequence[int] = (0, 1), **settings: object) -> None:
        self._run, self._settings = run, settings
        self._running = {ordinal: self._start(ordinal) for ordinal in ordinals}
        await_restored(run, *self._running.values())

    def revive(self) -> None:
        for ordinal, process in self._running.items():
            if process.poll() is not None:
                last = self._run.log_of(process).strip().splitlines()[-1]
                assert last.startswith("rollstream: "), last
                print(f"grouper {ordinal} is started again, after: {last}")
                self._running[ordinal] = self._start(ordinal)

    def stop(self) -> None:
        stop(*self._running.values())

    def _start(self, ordinal: int) -> subprocess.Popen[bytes]:
        return grouper(self._run, ordinal, self._settings, session_timeout_s=6.0)

    def restart(self, ordinal: int, how: signal.Signals) -> None:
        """End a grouper with SIGTERM or SIGKILL, start it again, and wait until it works."""
        process = self._running[ordinal]
        # One that was just started again could not stop in order yet.
        await_restored(self._run, process)
        process.send_signal(how)
        assert process.wait(300) in (0, -signal.SIGKILL)
        self._running[ordinal] = self._start(ordinal)
        await_restored(self._run, self._running[ordinal])
