"""Targets of hostile input: each takes so many inputs of one seed and says what became of every one of them.

Targets refuse input by an error of ours; any other error is a fault, and is not caught here.
"""

import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.hostile_input import HostileInput

Fates = Counter[str]
Run = Callable[[HostileInput, int, Path], Fates]
"""Gives so many inputs to a target, with a folder of its own, and counts them by what became of them."""


@dataclass(frozen=True)
class Target:
    """Something of ours that takes input."""

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
    """Most memory of the process so far."""
    failure: str = ""

    def __str__(self) -> str:
        fates = ", ".join(f"{fate} {count:,}" for fate, count in sorted(self.fates.items()))
        seeds = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"seeds {self.seeds[0]} to {self.seeds[-1]}"
        line = f"{self.target}: {self.fates.total():,} ({fates}), {seeds}, {self.seconds:.0f} s"
        return f"{line}, peak {self.peak_mib:.0f} MiB{self.failure}"


def flood(target: Target, inputs: int, seed: int, folder: Path) -> Outcome:
    """Give a target so many inputs, in pieces of one seed each; a failure names its seed."""
    outcome = Outcome(target.name, range(seed, seed + max(1, -(-inputs // target.piece))))
    began = time.monotonic()
    for number, piece_seed in enumerate(outcome.seeds):
        count = min(target.piece, inputs - number * target.piece)
        place = folder / f"{target.name.replace(' ', '-')}-{piece_seed}"
        place.mkdir()
        try:
            fates = target.run(HostileInput(piece_seed), count, place)
            assert fates.total() == count, f"{count} inputs have {fates.total()} places: {fates}"
        except Exception:
            outcome.failure = f"\nFAILED with seed {piece_seed}, {count} inputs:\n{traceback.format_exc()}"
            break
        outcome.fates += fates
    outcome.seconds, outcome.peak_mib = time.monotonic() - began, peak_mib()
    return outcome


def peak_mib() -> float:
    """The largest resident size that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def by_name(*targets: Target) -> Mapping[str, Target]:
    """Targets by their names."""
    return {target.name: target for target in targets}
