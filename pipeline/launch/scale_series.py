"""Measurements of a demo of scaling over time, and the figures that follow from them. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW_S = 3.0
"""Time over which rates are averaged: processes report their positions about every second."""


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The run at one time."""

    at_s: float
    """Time since the load began."""
    produced: int
    """Rollouts that the broker has acknowledged."""
    read: int
    """Records that grouping had read, by its newest gauges."""
    lag: int
    """Records that waited for grouping, by its newest gauges."""
    processes: int
    """Grouping processes that were ready."""
    wanted: int
    """Grouping processes that the autoscaler wanted."""


@dataclass(frozen=True)
class ScaleSeries:
    """Points in order of time."""

    points: tuple[ScalePoint, ...] = ()

    def with_point(self, point: ScalePoint) -> "ScaleSeries":
        """Return the series with one more point."""
        return ScaleSeries((*self.points, point))

    @property
    def seconds(self) -> float:
        """Time of the last point."""
        return self.points[-1].at_s if self.points else 0.0

    @property
    def times(self) -> tuple[float, ...]:
        """Time of each point."""
        return tuple(point.at_s for point in self.points)

    @property
    def lags(self) -> tuple[float, ...]:
        """Lag at each point."""
        return tuple(float(point.lag) for point in self.points)

    @property
    def processes(self) -> tuple[float, ...]:
        """Processes that were ready at each point."""
        return tuple(float(point.processes) for point in self.points)

    @property
    def produced_per_s(self) -> tuple[float, ...]:
        """Rollouts written per second, up to each point."""
        return _rates(self.times, tuple(point.produced for point in self.points))

    @property
    def read_per_s(self) -> tuple[float, ...]:
        """Records read per second, up to each point."""
        return _rates(self.times, tuple(point.read for point in self.points))

    @property
    def panels(self) -> dict[str, dict[str, tuple[float, ...]]]:
        """The series to draw, by the title of their chart and their name."""
        return {
            "Records that wait (lag)": {"lag": self.lags},
            "Grouping processes": {"processes": self.processes},
            "Records a second": {"rollouts written": self.produced_per_s, "records read": self.read_per_s},
        }

    @property
    def peak_lag(self) -> int:
        """Highest lag."""
        return max((point.lag for point in self.points), default=0)

    @property
    def most_processes(self) -> int:
        """Most processes that were ready at once."""
        return max((point.processes for point in self.points), default=0)

    @property
    def changes(self) -> tuple[tuple[float, int], ...]:
        """Times at which the number of ready processes changed, and the new numbers; the first entry is the start."""
        changes: list[tuple[float, int]] = []
        for point in self.points:
            if not changes or changes[-1][1] != point.processes:
                changes.append((point.at_s, point.processes))
        return tuple(changes)

    def as_list(self) -> list[dict[str, Any]]:
        """The points as plain values for JSON."""
        return [asdict(point) for point in self.points]


def _rates(times: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    rates, first = [], 0
    for number, (at_s, count) in enumerate(zip(times, counts, strict=True)):
        while times[first] < at_s - WINDOW_S and first < number - 1:
            first += 1
        passed_s = at_s - times[first]
        rates.append((count - counts[first]) / passed_s if passed_s > 0 else 0.0)
    return tuple(rates)
