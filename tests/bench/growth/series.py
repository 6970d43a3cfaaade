"""Series of costs over sizes, their slopes on logarithmic axes, and the rule that no slope exceeds its bound. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.2
"""A slope may exceed its bound by this much, because costs of about a second vary by 10 to 20% on a busy machine."""
_LAST = 3
"""Number of points, those of the largest sizes, that give the slope; costs of small sizes are mostly fixed costs."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Costs of one thing at increasing sizes."""

    name: str
    over: str
    """The thing that the sizes count."""
    unit: str
    """The unit of costs."""
    points: tuple[tuple[float, float], ...]
    """Size and cost."""
    bound: float | None
    """Largest slope: 1 if the cost may grow in proportion to the size, 0 if it may not grow. None if the cost is only
    shown: wall time depends on other work on the machine."""

    @property
    def slope(self) -> float:
        """Slope of the last points on logarithmic axes, by least squares: the exponent with which the cost grows."""
        last = [(math.log(size), math.log(cost)) for size, cost in self.points[-_LAST:]]
        if len(last) < 2:
            return 0.0
        middle = sum(x for x, _ in last) / len(last), sum(y for _, y in last) / len(last)
        spread = sum((x - middle[0]) ** 2 for x, _ in last)
        return sum((x - middle[0]) * (y - middle[1]) for x, y in last) / spread

    @property
    def offends(self) -> bool:
        """Whether the cost grows faster than it may."""
        return self.bound is not None and self.slope > self.bound + TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            "name": self.name,
            "over": self.over,
            "unit": self.unit,
            "points": [list(point) for point in self.points],
            "slope": self.slope,
            "bound": self.bound,
            "offends": self.offends,
        }


def report(listed: Sequence[Series], machine: Iterable[str]) -> str:
    """Return tables of costs, one for consecutive series over the same sizes, and the names of series that offend."""
    lines = [*machine]
    heading = ""
    for series in listed:
        sizes = "".join(f"{size:>9,.3g}" if size < 1000 else f"{size:>9,g}" for size, _cost in series.points)
        if heading != series.over + sizes:
            heading = series.over + sizes
            lines += ["", f"{series.over:28}{sizes}    slope  bound"]
        costs = "".join(f"{cost:>9.3g}" for _size, cost in series.points)
        bound = "-" if series.bound is None else f"{series.bound:g}"
        mark = "  OFFENDS" if series.offends else ""
        lines.append(f"{series.name + ', ' + series.unit:28}{costs}{series.slope:>9.2f}{bound:>7}{mark}")
    offenders = [series.name for series in listed if series.offends]
    lines += ["", f"worse than their bounds: {', '.join(offenders)}" if offenders else "none is worse than its bound"]
    return "\n".join(lines)


def collected(name: str, over: str, unit: str, bound: float | None, points: Iterable[tuple[float, float]]) -> Series:
    """Return a series of measured points."""
    return Series(name=name, over=over, unit=unit, points=tuple(points), bound=bound)
