"""A process that this one did not start, with the methods of `subprocess.Popen` that a supervisor uses."""

import signal
import subprocess
from pathlib import Path

from rollstream.infra.broker.process_identity import ProcessIdentity, await_end, is_running, send

NO_EXIT_CODE = 256
"""Exit code reported for an adopted process that left none, for example because it was killed."""
_LONG_S = 1e9


class AdoptedProcess:
    """A running process that writes its exit code to a file when it ends by itself."""

    def __init__(self, identity: ProcessIdentity, exit_file: Path) -> None:
        self.identity = identity
        self.pid = identity.pid
        self.returncode: int | None = None
        self._exit_file = exit_file

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and not is_running(self.identity):
            self.returncode = _read(self._exit_file)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends and return its exit code. Raises subprocess.TimeoutExpired."""
        if not await_end(self.identity, _LONG_S if timeout is None else timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None, "it has ended"
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        send(self.identity, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        send(self.identity, signal.SIGKILL)


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return NO_EXIT_CODE
