"""Runs the roles of a run as child processes and guarantees that none is left behind, however it ends.

Each role has its own session, log file and two pipes: one for readiness, and a lifeline whose end of file tells it that
the supervisor is gone, even by kill -9. The role then ends, unless another supervisor adopts it in time. A role that
exits by itself is started again a bounded number of times, or without end if the other roles can go on without it.
"""

import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rollstream.infra.broker.process_identity import await_end
from rollstream.pipeline.process import interruption
from rollstream.pipeline.process.orphans import REGISTRY_VARIABLE
from rollstream.pipeline.process.role_process import (
    HURRY_S,
    LIFELINE_VARIABLE,
    LISTEN_VARIABLE,
    READY,
    READY_VARIABLE,
    Interrupts,
    in_a_hurry,
)
from rollstream.pipeline.run.diagnoses import CrashLoop
from rollstream.pipeline.run.process_registry import ProcessRegistry
from rollstream.pipeline.run.supervised_role import (
    AdoptedProcess,
    RoleSpec,
    SupervisedRole,
    Unstarted,
    cause_in,
    name_exit,
    put_aside,
)
from rollstream.topics.errors import DeadlineExceeded, Fenced, RollstreamError
from rollstream.topics.heartbeats import beat
from rollstream.topics.logs import event
from rollstream.topics.metrics.values import VALUES

logger = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 60.0
"""Longest pause before a role is started again."""
_LOOK_S = 0.1
"""How often a wait for a role looks for a Ctrl-C."""
_KILLED_S = 1.0
"""How long to wait for a killed process to end."""


class RoleFailed(RollstreamError):
    """A role exited more often than allowed, or before it was ever ready; the message quotes its log."""

    exit_code = 1


class Supervisor:
    """Starts, watches and stops roles. Not thread-safe: one thread calls it, and calls `poll` often.

    Use it as a context manager: on exit, for whatever reason, no process remains. After Ctrl-C roles have
    HURRY_S to stop.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        interrupts: Interrupts | None = None,
        environment: Mapping[str, str] = os.environ,
        on_progress: Callable[[str, str], None] = lambda _role, _progress: None,
        place: Callable[[RoleSpec], RoleSpec] = lambda spec: spec,
        may_end: Callable[[str], bool] = lambda _kind: False,
        registry: ProcessRegistry | None = None,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_progress` is called with the name of a role and each progress line of its start. `place` adds to a role
        what depends on other processes of this machine, such as its port. `may_end` tells whether roles of a kind may
        exit with 0 now; a role that did so is started again once that is no longer allowed. Roles in `registry` that a
        previous supervisor left are adopted instead of started, except optional roles. `check` raises an error if this
        supervisor must end.

        `clock` returns the time, in seconds, that decides when roles are late to become ready or due to be restarted.
        """
        self.log_dir = log_dir
        self._interrupts = interrupts or Interrupts()
        self._environment = dict(environment)
        self._on_progress = on_progress
        self._place, self._may_end, self._registry = place, may_end, registry
        self._check, self._clock = check, clock
        self._roles: dict[str, SupervisedRole] = {}
        self._loops: dict[str, CrashLoop] = {}
        self._restarts = 0
        """Restarts of all roles, including roles that were retired since: a counter must not fall."""
        self._hurry_until: float | None = None
        """Time until which roles may stop after a Ctrl-C."""
        self._lifeline_read, self._lifeline_write = os.pipe()  # the write end is never inherited
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An interrupt must not cut the stop short, nor replace an error that ends the run.
        with self._interrupts.deferred(raises=value is None):
            try:
                if in_a_hurry(value):
                    self.stop(list(self._roles))
                else:
                    self.stop_all()
            finally:
                self.kill_all()
                os.close(self._lifeline_write)
                os.close(self._lifeline_read)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the roles that run now."""
        return {name: role.process.pid for name, role in self._roles.items() if not role.reaped}

    @property
    def adopted(self) -> tuple[str, ...]:
        """Names of the running roles that a previous supervisor started."""
        roles = self._roles.items()
        return tuple(name for name, role in roles if isinstance(role.process, AdoptedProcess) and not role.reaped)

    def holds(self, name: str) -> bool:
        """Whether a role runs, ends, or is to be started again; false for a retired role that has ended."""
        return name in self._roles

    def start(self, *specs: RoleSpec) -> None:
        """Start roles, without waiting until they are ready."""
        for spec in specs:
            if spec.name in self.pids:
                raise ValueError(f"role {spec.name} already runs")
            placed = self._place(spec)
            if not self._adopt(placed):
                self._spawn(placed)

    def wait_ready(self, names: Iterable[str], look: Callable[[], object] = lambda: None) -> None:
        """Wait until these roles are ready, except expendable roles, and call `look` meanwhile. Raises DeadlineExceeded
        or RoleFailed with the cause."""
        pending = {name for name in names if not self._roles[name].spec.expendable}
        while pending:
            self.poll(0.2)
            look()
            pending = {name for name in pending if not self._roles[name].ready}

    def poll(self, timeout_s: float = 0.0) -> None:
        """Handle what happens within `timeout_s`: readiness, exits, due restarts.

        Raises RoleFailed if a role exited too often or before it was ever ready, Fenced if another process took the
        place of a role that the run needs, DeadlineExceeded if a role is not ready in time, and what `check` raises.
        """
        self._check()
        self._read_readiness(timeout_s)
        beat("supervisor")
        self._serve_figures()
        now = self._clock()
        for role in list(self._roles.values()):
            self._notice_exit(role, now)
            if role.retired_until is not None:
                self._end_retired(role, now)
                continue
            if role.excused and not self._may_end(role.spec.kind):
                role.excused, role.restart_at = False, now
            if role.restart_at is not None and now >= role.restart_at:
                self._spawn(role.spec, predecessor=role)
            self._notice_lateness(role, now)

    @property
    def crash_loops(self) -> Mapping[str, CrashLoop]:
        """The last exit of each role that exits again and again while the other roles go on, by name."""
        now = self._clock()
        return {
            name: loop
            for name, loop in self._loops.items()
            if name in self._roles
            and (loop.is_final or now - self._roles[name].recent[-1] < self._roles[name].spec.window_s)
        }

    def finished(self, name: str) -> bool:
        """Whether a role that finishes by itself has done so."""
        role = self._roles[name]
        return role.spec.finishes and role.reaped and role.process.returncode == 0 and not role.stopping

    def is_ready(self, name: str) -> bool:
        """Whether a role runs and has reported that it is ready."""
        role = self._roles[name]
        return role.ready and not role.reaped

    def failure(self, name: str) -> str:
        """Return why an optional role is not started again, or "" if it has not failed for good."""
        return self._roles[name].failure

    def kill(self, name: str) -> int | None:
        """SIGKILL a role as a crash would, so that `poll` starts it again; return its process id.

        Return None if it does not run.
        """
        role = self._roles[name]
        if role.reaped or role.process.poll() is not None:
            return None
        role.process.kill()
        role.process.wait()
        role.ready = False
        return role.process.pid

    def stop(self, names: Sequence[str]) -> None:
        """Send SIGTERM to these roles together, wait for each until its own deadline, after Ctrl-C for HURRY_S at most,
        then SIGKILL those that still run."""
        roles = [self._roles[name] for name in names if name in self._roles]
        began = time.monotonic()
        for role in roles:
            role.stop_for_good()
            if not role.reaped:
                event(logger, "role_stopping", role=role.spec.name)
                role.process.terminate()
        for role in roles:
            if role.reaped:
                continue
            try:
                code = self._exit_code(role, began + role.spec.stop_timeout_s)
                event(logger, "role_stopped", role=role.spec.name, exit_code=code, seconds=_since(began))
            except subprocess.TimeoutExpired:
                event(logger, "role_killed", level=logging.WARNING, role=role.spec.name, seconds=_since(began))
            self._kill(role)

    def _exit_code(self, role: SupervisedRole, deadline: float) -> int:
        """Wait for a role to end. Raises TimeoutExpired at the deadline, and soon after a Ctrl-C."""
        while True:
            if interruption.received():
                self._hurry_until = self._hurry_until or time.monotonic() + HURRY_S
                deadline = min(deadline, self._hurry_until)
            left_s = deadline - time.monotonic()
            try:
                return role.process.wait(max(min(left_s, _LOOK_S), 0.0))
            except subprocess.TimeoutExpired:
                if left_s <= _LOOK_S:
                    raise

    def retire(self, *names: str) -> None:
        """Send SIGTERM to roles that are no longer wanted, without waiting. `poll` kills a role that takes too long,
        and forgets it once it has ended, so that a role of this name can be started again."""
        for role in (self._roles[name] for name in names):
            role.stop_for_good()
            role.retired_until = self._clock() + role.spec.stop_timeout_s
            if not role.reaped:
                event(logger, "role_stopping", role=role.spec.name)
                role.process.terminate()

    def stop_all(self) -> None:
        """Stop every role, kind by kind in the reverse order of their first starts; roles of one kind stop together."""
        kinds = dict.fromkeys(role.spec.kind for role in self._roles.values())
        for kind in reversed(list(kinds)):
            self.stop([role.spec.name for role in self._roles.values() if role.spec.kind == kind])

    def kill_all(self) -> None:
        """SIGKILL every role and what it started, now."""
        for role in self._roles.values():
            role.stop_for_good()
            self._kill(role)

    def kill_now(self) -> None:
        """SIGKILL every role and what it started, from a signal handler or another thread, before the process ends.

        Unlike `kill_all` it takes no lock that the interrupted code may hold, and reaps no process.
        """
        running = [role.identity for role in self._roles.values() if not role.reaped]
        for process in filter(None, running):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in filter(None, running):
            await_end(process, _KILLED_S)

    def _serve_figures(self) -> None:
        roles = self._roles.values()
        VALUES.record(
            "run",
            {
                "processes": len(roles),
                "processes_ready": sum(role.ready and not role.reaped for role in roles),
                "restarts_total": self._restarts,
            },
        )

    def _adopt(self, spec: RoleSpec) -> bool:
        """Take over the process of a role that a previous supervisor left; return whether there was one."""
        registry = self._registered(spec)
        process = registry.adopt(spec.name, spec.command_digest) if registry else None
        if process is None:
            return False
        self._roles[spec.name] = SupervisedRole(
            spec=spec,
            log=self.log_dir / f"{spec.name}.log",
            process=process,
            ready_fd=None,
            started=time.monotonic(),
            heard=self._clock(),
            ready=True,
            ever_ready=True,
        )
        event(logger, "role_adopted", role=spec.name, pid=process.pid)
        return True

    def _registered(self, spec: RoleSpec) -> ProcessRegistry | None:
        return None if spec.optional else self._registry

    def _spawn(self, spec: RoleSpec, predecessor: SupervisedRole | None = None) -> None:
        """Start a role. Count a failure of the system to do so as an exit of the role; `poll` then tries again."""
        log, registry = self.log_dir / f"{spec.name}.log", self._registered(spec)
        listener = predecessor.listener if predecessor else None
        # After an interrupt between the start of a process and its entry here, only the lifeline would end the process.
        with self._interrupts.deferred():
            now, began = self._clock(), time.monotonic()
            role = SupervisedRole(
                spec=spec,
                log=log,
                process=Unstarted(),
                ready_fd=None,
                started=began,
                heard=now,
                reaped=True,
                listener=listener,
            )
            role.listen()
            try:
                role.process, role.ready_fd = self._start_process(spec, log, registry, role.listener)
            except OSError as error:  # no room on the disk, or no process or file is left
                self._note_unstarted(predecessor or role, error)
                return
            role.reaped = False
            if predecessor is not None:
                self._restarts += 1
                role.exits, role.ever_ready, role.recent = (
                    predecessor.exits + 1,
                    predecessor.ever_ready,
                    predecessor.recent,
                )
            self._roles[spec.name] = role
            if registry:
                registry.register(spec.name, role.process.pid, spec.command_digest)
        event(logger, "role_started", role=spec.name, pid=role.process.pid, log=str(log), restarts=role.exits)

    def _start_process(
        self, spec: RoleSpec, log: Path, registry: ProcessRegistry | None, listener: socket.socket | None
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start the process of a role; return it with the pipe on which it reports. Raises OSError."""
        environment = {**self._environment, **spec.environment, LIFELINE_VARIABLE: str(self._lifeline_read)}
        if registry:
            environment[REGISTRY_VARIABLE] = str(registry.path.absolute())
        passed = [self._lifeline_read]
        if listener is not None:
            environment[LISTEN_VARIABLE] = str(listener.fileno())
            passed.append(listener.fileno())
        self.log_dir.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it to free space
        put_aside(log)
        with log.open("ab") as output:
            ready_read, ready_write = os.pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, *spec.arguments],
                    env={k: v for k, v in environment.items() if v != ""} | {READY_VARIABLE: str(ready_write)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(ready_write, *passed),
                    start_new_session=True,
                )
            except BaseException:
                os.close(ready_read)
                raise
            finally:
                os.close(ready_write)
        return process, ready_read

    def _note_unstarted(self, role: SupervisedRole, error: OSError) -> None:
        self._roles[role.spec.name] = role
        role.exits += 1
        cause = f"{error}; check the disk of {self.log_dir} and the limits on processes and open files"
        self._start_later(role, self._clock(), "could not be started", cause, "role_not_started", error=str(error))

    def _read_readiness(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            for role in self._roles.values():
                if role.ready_fd is not None:
                    selector.register(role.ready_fd, selectors.EVENT_READ, role)
            if not selector.get_map():
                time.sleep(timeout_s)
                return
            for key, _ in selector.select(timeout_s):
                role = key.data
                output = os.read(key.fd, 65536)
                lines = output.splitlines(keepends=True)
                if lines and lines[-1] != READY:
                    role.heard, role.progress = self._clock(), lines[-1].decode(errors="replace").strip()
                    event(logger, "role_starting", role=role.spec.name, progress=role.progress)
                    self._on_progress(role.spec.name, role.progress)
                    continue
                if output:
                    role.ready = role.ever_ready = True
                    if self._registry:
                        self._registry.ready(role.spec.name)
                    event(logger, "role_ready", role=role.spec.name, seconds=_since(role.started))
                os.close(key.fd)
                role.ready_fd = None

    def _notice_exit(self, role: SupervisedRole, now: float) -> None:
        """Handle the exit of a role: finished, failed, or to be started again."""
        if role.reaped or role.stopping or role.process.poll() is None:
            return
        code, spec = role.process.returncode, role.spec
        assert code is not None, "it has ended"
        self._kill(role)
        role.excused = code == 0 and not spec.finishes and self._may_end(spec.kind)
        if role.excused or (spec.finishes and code == 0):
            event(logger, "role_finished", role=spec.name)
            role.ready = role.ever_ready = True
            return
        if code == Fenced.exit_code:
            self._lose(role)
            return
        self._start_later(
            role, now, f"exited with {name_exit(code)}", cause_in(role.log), "role_exited", exit_code=code
        )

    def _start_later(
        self, role: SupervisedRole, now: float, problem: str, cause: str, name: str, **fields: object
    ) -> None:
        """Have `poll` start a role that does not run, after a pause, and log the event `name`. Raises RoleFailed if the
        role failed too often."""
        spec, role.ready, role.restart_at = role.spec, False, None
        recent_exits = [at for at in role.recent if now - at < spec.window_s]
        pause_s = min(spec.backoff_s * 2 ** min(len(recent_exits), 30), max(_LONGEST_PAUSE_S, spec.backoff_s))
        if not role.ever_ready or len(recent_exits) >= spec.restarts:
            times = f" ({len(recent_exits) + 1} times)" if recent_exits else ""
            failure = f"{problem}{times}: {cause}"
            if spec.optional:
                self._give_up(role, failure)
                return
            if not self._is_spared(role):
                raise RoleFailed(f"role {spec.name} {failure}")
            pause_s = max(pause_s, _LONGEST_PAUSE_S)
            self._loops[spec.name] = CrashLoop(exits=len(recent_exits) + 1, cause=failure, again_in_s=pause_s)
            role.refuse_clients()  # another process may serve them
        else:
            role.listen()
        event(logger, name, level=logging.WARNING, role=spec.name, restart_in_s=pause_s, **fields)
        role.recent, role.restart_at = (*recent_exits, now), now + pause_s

    def _lose(self, role: SupervisedRole) -> None:
        """Leave a role to the process that took its place: started again, each would fence the other without end."""
        problem = f"gave way to another process in its place: {cause_in(role.log)}"
        if not self._is_spared(role):
            raise Fenced(f"role {role.spec.name} {problem}; end that process before you start `rollstream run` again")
        self._loops[role.spec.name] = CrashLoop(exits=1, cause=problem, again_in_s=math.inf)
        self._give_up(role, problem)

    def _is_spared(self, role: SupervisedRole) -> bool:
        """Whether the other roles go on without a role: it is expendable, or another role of its kind does its work."""
        if role.spec.expendable:
            return True
        others = (other for other in self._roles.values() if other is not role and other.spec.kind == role.spec.kind)
        return role.spec.shares_work and role.ever_ready and any(o.ready and not o.reaped for o in others)

    def _notice_lateness(self, role: SupervisedRole, now: float) -> None:
        """Handle a role that is not ready in time: end it if the other roles can go on without it, else fail."""
        if role.ready or role.reaped or role.stopping or now - role.heard <= role.spec.ready_timeout_s:
            return
        if self._is_spared(role) and role.process.poll() is None:
            role.process.kill()  # `poll` counts this exit like any other exit
            role.process.wait()
            return
        after = f" after its last progress report: {role.progress}" if role.progress else ""
        problem = f"was not ready within {role.spec.ready_timeout_s:g} s{after}: {cause_in(role.log)}"
        if not role.spec.optional:
            raise DeadlineExceeded(f"role {role.spec.name} {problem}")
        self._give_up(role, problem)

    def _give_up(self, role: SupervisedRole, problem: str) -> None:
        """End an optional role for good."""
        event(logger, "role_given_up", level=logging.WARNING, role=role.spec.name, error=problem)
        self._kill(role)
        role.refuse_clients()
        role.ready, role.failure = False, problem

    def _end_retired(self, role: SupervisedRole, now: float) -> None:
        """Forget a retired role once it has ended; kill it first if it takes too long."""
        code = None if role.reaped else role.process.poll()
        if code is None and not role.reaped and role.retired_until is not None and now < role.retired_until:
            return
        if code is not None:
            event(logger, "role_stopped", role=role.spec.name, exit_code=code)
        elif not role.reaped:
            event(logger, "role_killed", level=logging.WARNING, role=role.spec.name)
        self._kill(role)
        del self._roles[role.spec.name]
        self._loops.pop(role.spec.name, None)

    def _kill(self, role: SupervisedRole) -> None:
        """SIGKILL the role's process group, which contains whatever it started, and reap it, but only once, because ids
        are reused."""
        if role.reaped:
            return
        role.kill_group()
        role.process.wait()
        role.reaped = True
        if self._registry:
            self._registry.forget(role.spec.name)
        if role.ready_fd is not None:
            os.close(role.ready_fd)
            role.ready_fd = None


def _since(start: float) -> float:
    return round(time.monotonic() - start, 3)
