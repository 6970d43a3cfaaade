"""A pool of processes that run a verifier within limits on time and memory, for environments.

A verifier that hangs, crashes or uses too much memory fails only its own call, with VerifierFailed, so its member of
the group is cancelled and never gets a reward of zero; the process is replaced. The limits protect against faults. They
are not a sandbox: code that a model wrote can do whatever the worker's user can.
"""

import asyncio
import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollstream.producers.environments.environment import Score
from rollstream.producers.environments.verifier_process import SIZE_BYTES
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.secrets import program_environment

START_TIMEOUT_S = 60.0
"""Time for a process to start and to import the verifier."""
_MOST_ANSWER_BYTES = 1 << 20
_PROGRAM = "rollstream.producers.environments.verifier_process"


class VerifierFailed(RollstreamError):
    """A verifier did not score an answer: it raised an error, it exceeded a limit, or its process ended."""


class VerifierPool:
    """Scores answers with a function that runs in separate processes; await the pool like the function.

    `pool = VerifierPool(judge)`, then `score = await pool(prompt, text)` with judge(prompt, text) -> Score or a number.
    Processes start with the first calls and serve many calls each.
    """

    def __init__(
        self,
        verifier: Callable[..., Score | float] | str,
        *,
        processes: int = 0,
        timeout_s: float = 10.0,
        memory_bytes: int = 1 << 30,
    ) -> None:
        """`verifier` is a function of a module, or its name: package.module:function or path/to/file.py:function.
        If it is a class, each process makes an object of the class, without arguments, and calls the object.

        `processes` is the number of calls that run at once (0: one for each core), `timeout_s` the time limit of a
        call, and `memory_bytes` the memory that a process may use in addition to what it uses once the verifier is
        imported (Linux only). Arguments must be picklable. Raises ConfigurationError for a function that another
        process cannot import.
        """
        if processes < 0 or not timeout_s > 0 or memory_bytes < 1:
            raise ConfigurationError(
                f"a verifier pool needs processes >= 0, timeout_s > 0 and memory_bytes > 0, not {processes}, "
                f"{timeout_s:g} and {memory_bytes}"
            )
        self.name = verifier if isinstance(verifier, str) else _name_of(verifier)
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self._threads = ThreadPoolExecutor(processes or os.cpu_count() or 1, thread_name_prefix="verifier")
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._finalizer = weakref.finalize(self, _kill_all, self._all)

    async def __call__(self, *arguments: Any) -> Score:
        """Return the score of the verifier for these arguments.

        Raises VerifierFailed, or ConfigurationError if a new process cannot import the verifier.
        """
        return await asyncio.wrap_future(self._threads.submit(self._score, arguments))

    def close(self) -> None:
        """End the processes; calls in progress fail."""
        self._finalizer()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _score(self, arguments: tuple[Any, ...]) -> Score:
        payload = pickle.dumps(arguments)
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is None:
            child = _Child(self.name, self.timeout_s, self.memory_bytes)
            with self._lock:
                self._all.add(child)
            try:
                started = child.receive(START_TIMEOUT_S)
            except VerifierFailed:
                self._end(child)
                raise
            if "ready" not in started:
                self._end(child)
                raise ConfigurationError(f"the verifier {self.name} cannot be imported: {started.get('error')}")
        try:
            child.send(payload, self.timeout_s)
            answer = child.receive(self.timeout_s)
        except VerifierFailed:
            self._end(child)
            raise
        if answer.get("ends"):
            self._end(child)
        else:
            with self._lock:
                self._idle.append(child)
        return _score_of(answer, self.name)

    def _end(self, child: "_Child") -> None:
        child.kill()
        with self._lock:
            self._all.discard(child)


class _Child:
    """One process, and the socket to it."""

    def __init__(self, name: str, timeout_s: float, memory_bytes: int) -> None:
        self._name = name
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        if main is not None and main.name == _PROGRAM:
            raise ConfigurationError(
                f"a process of a verifier pool imports the code of {name}, which calls a pool again, and so on without "
                'end; put what runs the pool under `if __name__ == "__main__":`'
            )
        self._ending = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", _PROGRAM]
            self._process = subprocess.Popen(
                [*command, name, str(theirs.fileno()), repr(timeout_s), str(memory_bytes)],
                env={**program_environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )

    def send(self, payload: bytes, timeout_s: float) -> None:
        """Send arguments. Raises VerifierFailed if the process has ended or does not read them in time."""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(len(payload).to_bytes(SIZE_BYTES, "big") + payload)
        except OSError as error:
            raise VerifierFailed(f"the process of the verifier {self._name} has ended: {error}") from error

    def receive(self, timeout_s: float) -> Mapping[str, Any]:
        """Wait for a line of JSON. Raises VerifierFailed if no valid line arrives in time."""
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = self._socket.recv(65536)
            except TimeoutError as error:
                raise VerifierFailed(
                    f"the verifier {self._name} gave no score within {timeout_s:g} s; repair it, or raise timeout_s"
                ) from error
            except OSError as error:
                raise VerifierFailed(f"the process of the verifier {self._name} cannot be read: {error}") from error
            if not received:
                self.kill()
                raise VerifierFailed(f"the process of the verifier {self._name} ended with {self._process.returncode}")
            line += received
            if len(line) > _MOST_ANSWER_BYTES:
                raise VerifierFailed(f"the verifier {self._name} answered with more than {_MOST_ANSWER_BYTES:,} bytes")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise VerifierFailed(f"the verifier {self._name} did not answer with JSON: {error}") from error
        if not isinstance(answer, dict):
            raise VerifierFailed(f"the verifier {self._name} did not answer with a JSON object")
        return answer

    def kill(self) -> None:
        """End the process and the processes that it started."""
        with self._ending:
            # A process that has crashed still leads its group, and keeps its number, until it is waited for.
            if self._process.returncode is None:
                # macOS refuses permission for a group of which only the crashed process is left.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._socket.close()


def _kill_all(children: set[_Child]) -> None:
    for child in list(children):
        child.kill()


def _score_of(answer: Mapping[str, Any], name: str) -> Score:
    """Return the score in an answer. Raises VerifierFailed if it is missing or invalid."""
    if "error" in answer:
        raise VerifierFailed(f"the verifier {name} failed: {str(answer['error'])[:500]}")
    reward, components = answer.get("reward"), answer.get("components", {})
    if not isinstance(components, dict):
        raise VerifierFailed(f"the verifier {name} gave components that are not an object")
    for part, value in {"reward": reward, **components}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise VerifierFailed(f"the verifier {name} gave {part} {value!r}, which is not a finite number")
    return Score(reward=float(reward or 0.0), components={part: float(value) for part, value in components.items()})


def _name_of(verifier: Callable[..., object]) -> str:
    """Return the name under which another process can import a function."""
    module = sys.modules.get(getattr(verifier, "__module__", ""))
    attribute = getattr(verifier, "__qualname__", "")
    if module is None or not attribute.isidentifier():
        raise ConfigurationError(
            f"the verifier is {verifier!r}, which another process cannot import; make it a function of a module"
        )
    file = getattr(module, "__file__", None)
    by_file = module.__name__ == "__main__" or module.__name__.startswith("rollstream_user_")
    return f"{Path(file).resolve() if by_file and file else module.__name__}:{attribute}"
