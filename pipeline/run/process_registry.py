"""A supervisor's list of the processes of its run, and the adoption of processes that a killed supervisor left.

Adoption costs a run nothing: groups and steps in flight go on. A process is adopted if it was ready, if its identity
still matches the list (a pid alone may have been reused), and if this supervisor would start it in the same way.
"""

import logging
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from rollstream.infra.broker.process_identity import ProcessIdentity, await_end, identify, is_running, kill_group, send
from rollstream.pipeline.process.orphans import EXIT_FILES, RegisteredProcess, RegisteredRun, exit_file, read
from rollstream.pipeline.run.supervised_role import AdoptedProcess
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError, lock_directory, write_json
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_LOCK = "lock"
_KILLED_S = 5.0


class ProcessRegistry(Closing):
    """The list in a folder. One supervisor at a time owns it, and removes it with `close`."""

    def __init__(
        self, directory: Path, configuration: str, *, adoption_s: float = 30.0, stop_timeout_s: float = 20.0
    ) -> None:
        """Take over the list, and end the processes in it that were not ready or follow another configuration.
        `configuration` is the digest of the run's configuration. Raises ConfigurationError if another supervisor owns
        the list."""
        self.path = directory / "processes.json"
        self._stop_timeout_s = stop_timeout_s
        try:
            self._lock = lock_directory(directory, _LOCK)
        except StoreError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            other = read(self.path)
            if other is not None and is_running(other.supervisor):
                owner = f"process {other.supervisor.pid} already supervises this run on this machine ({self.path})"
            else:
                owner = f"another `rollstream run` supervises {directory}, perhaps on another host that shares it"
            raise ConfigurationError(f"{owner}; stop it first, or give this run another name or data_dir") from error
        # Processes that nobody adopted left these files; a new process may get the id of one of them.
        for leftover in directory.glob(EXIT_FILES):
            leftover.unlink(missing_ok=True)
        before = read(self.path)
        self.previous = None if before is None else before.supervisor
        """The supervisor that was killed while it owned the list."""
        running = {} if before is None else {n: p for n, p in before.processes.items() if is_running(p.process)}
        same = before is not None and before.configuration == configuration
        self.orphans = {name: entry for name, entry in running.items() if same and entry.ready}
        """Processes that may be adopted, by name."""
        supervisor = identify(os.getpid())
        assert supervisor is not None, "this process runs"
        self._run = RegisteredRun(supervisor, configuration, adoption_s, dict(self.orphans))
        self._write()
        self._end(entry.process for name, entry in running.items() if name not in self.orphans)

    def adopt(self, name: str, command: str) -> AdoptedProcess | None:
        """Return the process with this name, if it still runs and was started by the same command. End it if it was
        started by another command."""
        orphan = self.orphans.pop(name, None)
        if orphan is None:
            return None
        if orphan.command == command and is_running(orphan.process):
            return AdoptedProcess(orphan.process, exit_file(self.path, orphan.process.pid))
        self._end([orphan.process])
        self.forget(name)
        return None

    def end_orphans(self) -> None:
        """End the processes that nobody adopted."""
        left, self.orphans = self.orphans, {}
        self._end(entry.process for entry in left.values())
        for name in left:
            self.forget(name)

    def register(self, name: str, pid: int, command: str) -> None:
        """Add a process that was started to the list."""
        process = identify(pid)
        if process is not None:
            self._put(name, RegisteredProcess(process, command, ready=False))

    def ready(self, name: str) -> None:
        """Note that a process is ready."""
        if name in self._run.processes:
            self._put(name, replace(self._run.processes[name], ready=True))

    def forget(self, name: str) -> None:
        """Remove a process that has ended from the list."""
        processes = dict(self._run.processes)
        entry = processes.pop(name, None)
        if entry is not None:
            exit_file(self.path, entry.process.pid).unlink(missing_ok=True)
            self._run = replace(self._run, processes=processes)
            self._write()

    def close(self) -> None:
        """Remove the list, and end the processes in it that nobody adopted."""
        self.end_orphans()
        self.path.unlink(missing_ok=True)
        self._lock.release()

    def _put(self, name: str, entry: RegisteredProcess) -> None:
        self._run = replace(self._run, processes={**self._run.processes, name: entry})
        self._write()

    def _write(self) -> None:
        try:
            write_json(self.path, asdict(self._run))
        except StoreError as error:  # the run goes on, though nobody could adopt its processes
            event(logger, "registry_not_written", level=logging.WARNING, error=str(error))

    def _end(self, processes: Iterable[ProcessIdentity]) -> None:
        """End processes together, and whatever they started."""
        ending = [process for process in processes if send(process, signal.SIGTERM)]
        deadline = time.monotonic() + self._stop_timeout_s
        for process in ending:
            await_end(process, max(0.0, deadline - time.monotonic()))
            kill_group(process)
            await_end(process, _KILLED_S)
