"""Targets of hostile input: each takes a number of inputs of one seed and reports the outcome of each input.

Targets refuse input with one of our errors; any other error is a fault, and is not caught here.
"""

import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.hostile_input import HostileInput

Fates = Counter[str]
Run = Callable[[HostileInput, int, Path], Fates]
"""Gives so many inputs to a target, with a folder of its own, and counts them by what became of them."""


@dataclass(frozen=True)
class Target:
    """A part of our code that takes input."""

    name: str
    run: Run
    short: int
    """Number of inputs that take about a second."""
    share: int
    """Inputs of this target among ten thousand of a long flood."""
    piece: int = 100_000
    """Most inputs of one seed: a long flood has as many seeds as it needs."""


@dataclass
class Outcome:
    """Fates of the inputs of one target."""

    target: str
    seeds: range
    fates: Fates = field(default_factory=Counter)
    seconds: float = 0.0
    peak_mib: float = 0.0
    """Most memory of a process so far."""
    failure: str = ""

    @classmethod
    def together(cls, pieces: Iterable["Outcome"]) -> "Outcome":
        """Join the outcomes of all pieces of a target, in the order of their seeds, in the first one."""
        first, *others = pieces
        for piece in others:
            first.seeds = range(first.seeds.start, piece.seeds.stop)
            first.fates += piece.fates
            first.seconds += piece.seconds
            first.peak_mib = max(first.peak_mib, piece.peak_mib)
            first.failure += piece.failure
        return first

    def __str__(self) -> str:
        fates = ", ".join(f"{fate} {count:,}" for fate, count in sorted(self.fates.items()))
        seeds = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"seeds {self.seeds[0]} to {self.seeds[-1]}"
        line = f"{self.target}: {self.fates.total():,} ({fates}), {seeds}, {self.seconds:.0f} s"
        return f"{line}, peak {self.peak_mib:.0f} MiB{self.failure}"


def pieces(target: Target, inputs: int, seed: int) -> list[tuple[int, int]]:
    """Seeds of the pieces of so many inputs to a target, each with the number of its inputs."""
    starts = range(0, max(1, inputs), target.piece)
    return [(seed + number, min(target.piece, inputs - start)) for number, start in enumerate(starts)]


def flood(target: Target, inputs: int, seed: int, folder: Path) -> Outcome:
    """Give a target so many inputs of one seed; a failure names the seed."""
    outcome, began = Outcome(target.name, range(seed, seed + 1)), time.monotonic()
    place = folder / f"{target.name.replace(' ', '-')}-{seed}"
    place.mkdir()
    try:
        outcome.fates = target.run(HostileInput(seed), inputs, place)
        total = outcome.fates.total()
        assert total == inputs, f"{inputs} inputs have {total} places: {outcome.fates}"
    except Exception:
        outcome.failure = f"\nFAILED with seed {seed}, {inputs} inputs:\n{traceback.format_exc()}"
    outcome.seconds, outcome.peak_mib = time.monotonic() - began, peak_mib()
    return outcome


def peak_mib() -> float:
    """The largest resident size that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def by_name(*targets: Target) -> Mapping[str, Target]:
    """Targets by their names."""
    return {target.name: target for target in targets}
