"""Main program of one process of a verifier pool: it imports the verifier, limits its memory, and scores on request.

A request is a size and pickled arguments of this size; an answer is one line of JSON. The process ends when the pool
ends, in whatever way, and so do the processes that the verifier started. A call that blocks the interpreter itself ends
soon after its time limit.
"""

import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import Any, BinaryIO

from rollstream.topics.user_code import load_object

SIZE_BYTES = 8
_GRACE_S = 5.0
"""Time beyond a call's limit after which the process ends by itself."""


def main() -> None:
    """Serve until the other side of the socket is closed."""
    name, descriptor, timeout_s, memory_bytes = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as pool, pool.makefile("rb") as requests:
        Thread(target=_end_with, args=(pool,), daemon=True).start()
        try:
            verifier = load_object(name, "the verifier is", "a verifier is named package.module:function")
            if isinstance(verifier, type):
                verifier = verifier()
            _limit_memory(int(memory_bytes))
        except Exception as error:  # the pool raises it
            _answer(pool, {"error": f"{type(error).__name__}: {error}"})
            return
        _answer(pool, {"ready": True})
        with suppress(ConnectionError):  # the pool was killed in the middle of a call
            _serve(pool, requests, verifier, float(timeout_s))


def _end_with(pool: socket.socket) -> None:
    """End this process and those that it started once the pool's side of the socket is closed."""
    poller = select.poll()
    poller.register(pool, select.POLLHUP)
    poller.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _serve(pool: socket.socket, requests: BinaryIO, verifier: Any, timeout_s: float) -> None:
    while size := requests.read(SIZE_BYTES):
        payload = requests.read(int.from_bytes(size, "big"))
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
        answer = _score(verifier, payload)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _answer(pool, answer)


def _score(verifier: Any, payload: bytes) -> dict[str, Any]:
    try:
        score = verifier(*pickle.loads(payload))
        reward = getattr(score, "reward", score)
        components: Mapping[str, Any] = getattr(score, "components", {})
        return {
            "reward": float(reward),
            "components": {str(name): float(value) for name, value in components.items()},
        }
    except MemoryError:
        # The interpreter may not release its memory, so the process is replaced.
        return {"error": "MemoryError: it took more memory than memory_bytes allows", "ends": True}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000], "ends": not isinstance(error, Exception)}


def _limit_memory(memory_bytes: int) -> None:
    """Limit the address space to its current size plus `memory_bytes`; without /proc there is no limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            now_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now_bytes + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _answer(pool: socket.socket, answer: Mapping[str, Any]) -> None:
    pool.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
