"""Runs code that a policy wrote in a process of its own, with limits on time, memory, files, network and processes.

The code gets an empty environment, and calls of one function with arguments of JSON; the values it returns come back as
JSON, and whoever asks compares them. So nothing that the code prints, writes or changes in its process makes a result
right, and code that exits early has no results. `producers/environments/sandboxed.py` is what runs in the process.
"""

import asyncio
import json
import logging
import os
import signal
import site
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollstream.topics.errors import RollstreamError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
Isolation = Literal["namespaces", "landlock", "limits"]
ISOLATIONS: tuple[Isolation, ...] = ("namespaces", "landlock", "limits")
"""The strongest first: files, processes and network of its own; no other files, TCP and signals; limits alone."""
FOLDERS = [f for f in (f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64") if os.path.isdir(f)]
"""Folders that Python needs to run with its own library."""
_HIDDEN = [*site.getsitepackages([sys.base_prefix, "/usr", "/usr/local"]), str(Path(__file__).parents[2])]
"""Folders of installed packages, which may hold the right answers."""
_SCRIPT = Path(__file__).with_name("sandboxed.py")
_READY = b"ready\n"
_RESULT_BYTES = 1 << 20


class SandboxFailed(RollstreamError):
    """The process could not be set up, so nothing is known about the code."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the code may use in all."""

    cpu_s: int = 2
    wall_s: float = 20.0
    """Ends code that sleeps. Much longer than `cpu_s`, because a busy machine must not make right code fail."""
    memory_bytes: int = 256 << 20
    disk_bytes: int = 4 << 20
    """Files in memory, in a namespace; without one, code can write no file."""
    open_files: int = 16
    printed_bytes: int = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the code."""

    values: tuple[Any, ...]
    """One for each call: the value it returned, or a Failure."""
    printed: str
    error: str = ""
    """Why the code itself ended before the calls, or the process before its end; empty if it did not."""


@dataclass(frozen=True)
class Failure:
    """A call that returned nothing, and why."""

    error: str


class Sandbox:
    """Runs code, at most as many processes at a time as there are processors."""

    def __init__(self, limits: Limits | None = None, isolation: Isolation | None = None) -> None:
        """Without `isolation`, the first run finds the strongest that the system allows, and logs it once."""
        self.limits = limits or Limits()
        self.isolation = isolation
        self._turn = asyncio.Semaphore(os.cpu_count() or 1)
        self._choosing = asyncio.Lock()

    async def run(self, code: str, function: str = "", calls: Sequence[Sequence[Any]] = ()) -> Outcome:
        """Execute code, and then call its function once with each of the lists of arguments.

        Raises SandboxFailed if the process could not be set up.
        """
        async with self._choosing:
            if self.isolation is None:
                self.isolation = await self._strongest()
        async with self._turn:
            return await self.run_in(self.isolation, code, function, calls)

    async def _strongest(self) -> Isolation:
        failures = {}
        for isolation in ISOLATIONS:
            try:
                outcome = await self.run_in(isolation, "import math, random, re\ndef f(): return 1", "f", [[]])
            except SandboxFailed as failed:
                failures[isolation] = str(failed)
            else:
                if outcome.values == (1,):
                    level = logging.INFO if isolation == "namespaces" else logging.WARNING
                    event(logger, "code_runs_in_a_sandbox", level=level, isolation=isolation, refused=failures)
                    return isolation
                failures[isolation] = outcome.error or outcome.values[0].error
        raise SandboxFailed(
            f"code cannot be run: {failures}; as root, use a Python that other users can read, or allow namespaces"
        )

    async def run_in(self, isolation: Isolation, code: str, function: str, calls: Sequence[Sequence[Any]]) -> Outcome:
        """Run code in one isolation, as `run` does in the strongest."""
        limits = self.limits
        request = {
            "code": code,
            "function": function,
            "calls": calls,
            "isolation": isolation,
            "folders": FOLDERS,
            "hidden": _HIDDEN,
            "disk_bytes": limits.disk_bytes,
            "limits": {
                "CPU": limits.cpu_s,
                "AS": limits.memory_bytes,
                # Only a file system in memory limits all files together.
                "FSIZE": limits.disk_bytes if isolation == "namespaces" else 0,
                "NOFILE": limits.open_files,
                "NPROC": 0,
                "CORE": 0,
            },
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_SCRIPT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None  # PIPE promises it.
        results, printed = bytearray(), bytearray()
        ended = ""

        def end(why: str = "") -> None:
            nonlocal ended
            ended = ended or why
            # In namespaces, the process outside kills the one inside, and with it everything there.
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM if isolation == "namespaces" else signal.SIGKILL)

        async def finished() -> None:
            await asyncio.gather(
                _read(process.stdout, results, _RESULT_BYTES, end),
                _read(process.stderr, printed, limits.printed_bytes, end),
                process.wait(),
            )

        timer = asyncio.get_running_loop().call_later(limits.wall_s, end, f"it took longer than {limits.wall_s:g} s")
        try:
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
            await finished()
        finally:
            timer.cancel()
            end()
            await finished()
        text = printed.decode(errors="replace")
        if not results.startswith(_READY):
            raise SandboxFailed(f"the process for code was not set up ({isolation}): {ended or text[-300:]}")
        if process.returncode and not ended:
            ended = f"it ended with {process.returncode}; it may use {limits.cpu_s} s and {limits.memory_bytes} bytes"
        lines = [_parsed(line) for line in bytes(results[len(_READY) :]).split(b"\n")[:-1]]
        begun, *values = lines or [Failure(ended or "it ended early")]
        if isinstance(begun, Failure):
            return Outcome(values=(begun,) * len(calls), printed=text, error=begun.error)
        missing = [Failure(ended or "it ended early")] * (len(calls) - len(values))
        return Outcome(values=tuple([*values, *missing][: len(calls)]), printed=text, error=ended)


async def _read(stream: asyncio.StreamReader | None, into: bytearray, most: int, end: Callable[[str], None]) -> None:
    assert stream is not None  # PIPE promises it.
    while data := await stream.read(1 << 16):
        into += data[: most - len(into)]
        if len(into) >= most:
            end(f"it wrote more than {most} bytes")


def _parsed(line: bytes) -> Any:
    """Return the value of a line, or a Failure. The code may have written anything."""
    try:
        result = json.loads(line)
        return Failure(str(result["error"])) if "error" in result else result.get("value")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return Failure(f"unreadable: {error}"[:200])
