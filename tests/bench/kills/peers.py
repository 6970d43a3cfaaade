"""Loops of other projects as contenders: which processes each has, and what it does when one of them dies."""

import itertools
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.kills.loops import WORKERS, Folder
from tests.bench.kills.tally import Tally
from tests.support.paths import ROOT
from tests.support.waiting import eventually

MORE = (200, 600)
"""Rollouts between two kills: at least and at most."""


@dataclass(frozen=True)
class Loop:
    """A loop: the command of each of its processes, and how it restarts."""

    name: str
    roles: Mapping[str, tuple[str, ...]]
    restarts_alone: bool = False
    """Whether a process is started again by itself; otherwise the others are ended, and all begin again."""
    sweep: Callable[[Folder], None] = lambda folder: None
    """Clears what the loop deletes before all begin again."""


def _sweep_streams(folder: Folder) -> None:
    shutil.rmtree(folder.streams, ignore_errors=True)


def _streams(kept: str) -> dict[str, tuple[str, ...]]:
    workers = {f"worker-{number}": ("worker", str(number)) for number in range(WORKERS)}
    return {**workers, "preprocessor": ("preprocessor",), "trainer": ("trainer", kept)}


LOOPS = {
    "streams": Loop("streams of JSON lines (PipelineRL)", _streams("swept"), sweep=_sweep_streams),
    "streams-kept": Loop("the same streams kept, and the dead process alone restarted", _streams("kept"), True),
    "steps": Loop(
        "a file for each step (prime-rl)",
        {"orchestrator": ("orchestrator",), "trainer": ("step-trainer",)},
        sweep=_sweep_streams,
    ),
    "queue": Loop("a queue in one process (AReaL)", {"loop": ("loop",)}),
}


def victims(names: Collection[str], kills: int, rng: random.Random) -> Iterator[str]:
    """Yield the names of processes to kill, in rounds: each round has every name once, in a random order."""
    rounds = (rng.sample(sorted(names), len(names)) for _ in itertools.count())
    yield from itertools.islice(itertools.chain.from_iterable(rounds), kills)


@dataclass
class RunningLoop:
    """The processes of a loop."""

    loop: Loop
    folder: Folder
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start one process."""
        role, *arguments = self.loop.roles[name]
        command = [sys.executable, "-m", "tests.bench.kills.loops", role, str(self.folder.path), *arguments]
        with (self.folder.path / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """kill -9 one process, and do what the loop does then."""
        self.processes[name].kill()
        self.processes[name].wait()
        if self.loop.restarts_alone:
            self.start(name)
            return
        self.close(signal.SIGTERM)
        self.loop.sweep(self.folder)
        for each in self.loop.roles:
            self.start(each)

    def await_rollouts(self, more: int) -> None:
        """Wait until so many further rollouts are produced."""
        wanted = len(self.folder.produced()) + more
        eventually(lambda: len(self.folder.produced()) >= wanted or self.ended(), 60, f"{wanted} rollouts")
        assert not self.ended(), self.ended()

    def close(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End every process that is left."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(how)
            process.wait()

    def ended(self) -> list[str]:
        """Processes that have ended by themselves."""
        return [name for name, process in self.processes.items() if process.poll() is not None]


def tally_of(loop: Loop, directory: Path, kills: int, seed: int) -> Tally:
    """Run a loop, kill its processes at random, let it end in order, and count."""
    folder, rng = Folder(directory), random.Random(seed)
    directory.mkdir(parents=True)
    running, killed = RunningLoop(loop, folder), Counter[str]()
    try:
        for name in loop.roles:
            running.start(name)
        for name in victims(loop.roles, kills, rng):
            running.await_rollouts(rng.randrange(*MORE))
            running.kill(name)
            killed[name] += 1
        (directory / "stop").touch()
        # A process that ends with an error leaves others waiting for it, so this does not wait for them.
        eventually(
            lambda: (
                len(running.ended()) == len(running.processes)
                or any(process.poll() for process in running.processes.values())
            ),
            60,
            f"the end of {loop.name}",
        )
        codes = {name: process.poll() for name, process in running.processes.items()}
        assert set(codes.values()) == {0}, codes
    finally:
        running.close()
    return Tally.of(loop.name, killed, folder.produced(), folder.load()["lineage"], ())
