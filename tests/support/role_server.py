"""Starts roles by forking a process that has imported `rollstream` already: imports are most of a role's CPU time.

A forked role is a child of the process of the tests, as one that `subprocess` starts: it can be waited for, stopped and
killed. JAX is not imported before the fork, because its settings are read then and its threads would not survive.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "OMP_", "OPENBLAS_", "TZ", "LC_", "LANG")
"""Beginnings of variables that take effect only when a process starts."""
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20


class ForkedRole(subprocess.Popen[bytes]):
    """A role that was forked: all of Popen's interface but its streams, which go to a file."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        # What Popen's own methods need of one that it has started.
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self._child_created, self._communication_started, self._sigint_wait_secs = True, False, 0.25


def can_fork(environment: Mapping[str, str]) -> bool:
    """Return whether a fork with these variables behaves as a new process. REAL_PROCESSES=1 forbids all forks."""
    if sys.platform != "linux" or os.environ.get("REAL_PROCESSES"):
        return False
    return _at_start(environment) == _server().at_start


def fork(command: Sequence[str], out: int, directory: Path, environment: Mapping[str, str]) -> ForkedRole:
    """Start `[python, -P, -m, rollstream, *words]` with the output in the file `out`."""
    return ForkedRole(command, _server().fork(command[4:], out, directory, environment))


def role_environment(*more: Path) -> dict[str, str]:
    """Variables of processes that run the code of this checkout. A crash writes its threads to their logs."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT, *more)))
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


class _Server:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        environment = role_environment()
        self.at_start = _at_start(environment)
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
        with theirs:
            # Without a terminal Python buffers the output as that of a role, which goes to a file.
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
            )
        self._asking = threading.Lock()
        atexit.register(self.close)

    def fork(self, words: Sequence[str], out: int, directory: Path, environment: Mapping[str, str]) -> int:
        request = json.dumps([list(words), str(directory), dict(environment)]).encode()
        prctl = ctypes.CDLL(None).prctl
        with self._asking:
            # The server's child is left by its own parent at once, and then becomes ours.
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [request], [out])
                return int(self._socket.recv(64))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve(requests: socket.socket) -> None:
    """Fork for each request; returns in the fork, which is then set up as its request says."""
    while True:
        request, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 1)
        if not request:
            sys.exit()
        [out] = files
        read, write = os.pipe()
        if between := os.fork():
            os.close(write)
            os.close(out)
            os.waitpid(between, 0)
            requests.send(os.read(read, 64))
            os.close(read)
            continue
        between = os.getpid()
        if pid := os.fork():
            os.write(write, b"%d" % pid)
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        for end in (read, write, requests.detach()):
            os.close(end)
        _become(out, *json.loads(request))
        return


def _become(out: int, words: list[str], directory: str, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["rollstream", *words]


def _import_roles() -> None:
    from rollstream.pipeline.command_line.commands import COMMANDS, GROUPS

    modules: dict[str, Any] = {
        **COMMANDS,
        **{name: entry for group in GROUPS.values() for name, entry in group.items()},
    }
    for module, _summary in modules.values():
        if module:
            importlib.import_module(f"rollstream.pipeline.{module}")
    assert "jax" not in sys.modules
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the tests
    _import_roles()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    from rollstream.pipeline.command_line.entry import main

    main()
