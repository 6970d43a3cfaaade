"""Measuring ours and a baseline in turn, so that a machine that slows down slows both; medians over the repetitions."""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rollstream.topics.config import KafkaConfig
from tests.support.paths import ROOT

CHILD_TIMEOUT_S = 300.0


class Timing(NamedTuple):
    """How long something took for that many rollouts."""

    rollouts: int
    seconds: float
    cpu_seconds: float
    """Processor time of the process that did it, all its threads."""

    @property
    def rate(self) -> float:
        """Rollouts a second."""
        return self.rollouts / self.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of processor time a rollout."""
        return 1e6 * self.cpu_seconds / self.rollouts


class Stopwatch:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def timing(self, rollouts: int) -> Timing:
        """Cost of `rollouts` rollouts so far."""
        return Timing(rollouts, time.perf_counter() - self._began, time.process_time() - self._cpu_began)


def machine(load_before: float) -> dict[str, Any]:
    """The machine of a measurement, and its load before and after."""
    return {
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every row."""

    kafka: KafkaConfig
    directory: Path
    """Directory of the logs of child processes."""
    rollouts: int = 8000
    tokens: int = 2560
    """Tokens of a rollout."""
    group_size: int = 8
    partitions: int = 4
    repetitions: int = 3
    poll_records: int = 500
    """Most records taken from a client at once, and so in one transaction."""
    commit_interval_s: float = 0.03

    def with_rollouts(self, rollouts: int) -> "Settings":
        """These settings for so many rollouts, in polls small enough for several transactions."""
        return replace(self, rollouts=rollouts, poll_records=min(self.poll_records, max(1, rollouts // 8)))

    def with_length(self, tokens: int) -> "Settings":
        """These settings for rollouts of another length: as many tokens in all, but at most twice as many rollouts.

        Groups are whole, so that the other side can wait for everything that is produced.
        """
        groups = min(2 * self.rollouts, self.rollouts * self.tokens // tokens) // self.group_size
        return replace(self, tokens=tokens).with_rollouts(self.group_size * max(2 * self.partitions, groups))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: one timing of each side per repetition, in the order they were taken."""

    name: str
    what: str
    baseline: str
    size_bytes: int
    """Size of an encoded rollout."""
    ours: tuple[Timing, ...]
    raw: tuple[Timing, ...]
    tokens: float = 0
    """Mean tokens of a rollout, in rows where the size of a rollout matters."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by name."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours over the baseline of the same repetition; 1 is as fast as raw."""
        return tuple(o.rate / r.rate for o, r in zip(self.ours, self.raw, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return median(self.ratios)

    @property
    def noise(self) -> float:
        """How far the baseline alone varied over the repetitions, as a share of its median."""
        rates = [timing.rate for timing in self.raw]
        return (max(rates) - min(rates)) / median(rates)

    def as_dict(self) -> dict[str, Any]:
        """The row as programs read it."""
        return {
            "name": self.name,
            "what": self.what,
            "baseline": self.baseline,
            "ratio": self.ratio,
            "ratios": list(self.ratios),
            "rollouts_per_s": median(t.rate for t in self.ours),
            "baseline_rollouts_per_s": median(t.rate for t in self.raw),
            "cpu_us_per_rollout": median(t.cpu_us for t in self.ours),
            "baseline_cpu_us_per_rollout": median(t.cpu_us for t in self.raw),
            "noise": self.noise,
            "size_bytes": self.size_bytes,
            **(self._by_size() if self.tokens else {}),
            "figures": dict(self.figures),
        }

    def _by_size(self) -> dict[str, float]:
        ours, raw = (median(timing.rate for timing in side) for side in (self.ours, self.raw))
        return {
            "tokens": self.tokens,
            "mb_per_s": ours * self.size_bytes / 1e6,
            "baseline_mb_per_s": raw * self.size_bytes / 1e6,
            "tokens_per_s": ours * self.tokens,
        }


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """One measurement of latencies, in seconds: those of each side, by repetition."""

    name: str
    what: str
    baseline: str
    ours: tuple[tuple[float, ...], ...]
    raw: tuple[tuple[float, ...], ...]
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by name."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Our 99th percentile over the baseline's of the same repetition; 1 is as fast as raw."""
        return tuple(percentile(ours, 99) / percentile(raw, 99) for ours, raw in zip(self.ours, self.raw, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return median(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        """The row as programs read it; percentiles are medians over the repetitions, in milliseconds."""
        percentiles = {
            f"{side}p{p}_ms": 1000 * median(percentile(values, p) for values in repetitions)
            for side, repetitions in (("", self.ours), ("baseline_", self.raw))
            for p in (50, 99)
        }
        return {
            "name": self.name,
            "what": self.what,
            "baseline": self.baseline,
            "ratio": self.ratio,
            "ratios": list(self.ratios),
            "measured": min(len(values) for values in self.ours),
            **percentiles,
            "figures": dict(self.figures),
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` % of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def interleaved(
    repetitions: int, ours: Callable[[], Timing], raw: Callable[[], Timing]
) -> tuple[tuple[Timing, ...], tuple[Timing, ...]]:
    """Timings of both, measured in turn; which one comes first alternates too."""
    timings: dict[Callable[[], Timing], list[Timing]] = {ours: [], raw: []}
    for repetition in range(repetitions):
        for measure in (raw, ours) if repetition % 2 == 0 else (ours, raw):
            timings[measure].append(measure())
    return tuple(timings[ours]), tuple(timings[raw])


def in_child(module: str, settings: Settings, run: str, *, python: str = sys.executable) -> Timing:
    """Run a module of this package to its end as a process, as roles run; return the timing that it prints as JSON.

    `python` may belong to another environment that has what the module imports. Raises RuntimeError with the end of its
    log when it fails.
    """
    with ready_child(module, settings, run, python) as child:
        output, _ = child.communicate(timeout=CHILD_TIMEOUT_S)
    return Timing(**json.loads(output.splitlines()[-1]))


@contextmanager
def ready_child(
    module: str, settings: Settings, run: str, python: str = sys.executable
) -> Iterator[subprocess.Popen[str]]:
    """Such a process, from the moment when it says that it is ready; after the block it must end by itself.

    Raises RuntimeError with the end of its log when it fails.
    """
    log = settings.directory / f"{module}-{run}.log"
    arguments = {
        "bootstrap_servers": settings.kafka.bootstrap_servers,
        "run": run,
        "rollouts": settings.rollouts,
        "tokens": settings.tokens,
        "group_size": settings.group_size,
        "partitions": settings.partitions,
        "poll_records": settings.poll_records,
        "commit_interval_s": settings.commit_interval_s,
    }
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [python, "-m", f"tests.bench.{module}", json.dumps(arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as child,
    ):
        try:
            assert child.stdout is not None
            if child.stdout.readline() == "ready\n":
                try:
                    yield child
                except Exception as error:
                    raise RuntimeError(f"{error}; the end of {log.name}: {log.read_text()[-1000:]}") from error
            code = child.wait(CHILD_TIMEOUT_S)
        finally:
            child.kill()
    if code:
        raise RuntimeError(f"tests.bench.{module} exited with {code}: {log.read_text()[-2000:]}")
