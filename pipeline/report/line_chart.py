"""Line charts as SVG, for pages without scripts: axes, lines, and a description for screen readers. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 28
COLOURS = 8
"""Number of different colours for the lines of a chart; style.css defines them."""
_POINTS = 240
_CONSTANT, _NOTHING = 1e-9, 1e-100
"""Relative width up to which a range counts as constant, and size below which values count as zero."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart: finite values by step."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


def chart(title: str, curves: Sequence[Curve], number: int) -> str:
    """Draw curves over one axis of steps; `number` is unique among the charts of a page."""
    first = min(curve.steps[0] for curve in curves)
    last = max(curve.steps[-1] for curve in curves)
    low = min(min(curve.values) for curve in curves)
    high = max(max(curve.values) for curve in curves)
    ticks = value_ticks(low, high)
    frame = _Frame(first, max(last, first + 1), ticks[0], ticks[-1])
    words = "; ".join(f"{c.name} from {number_text(c.values[0])} to {number_text(c.values[-1])}" for c in curves)
    lines = "".join(_line(curve, frame, index % COLOURS) for index, curve in enumerate(curves))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{escape(title)}</title>'
        f'<desc id="d{number}">{escape(f"Steps {first} to {last}: {words}")}</desc>'
        f"{_value_axis(ticks, frame)}{_step_axis(first, last, frame)}{lines}</svg>"
    )


@dataclass(frozen=True)
class _Frame:
    """The part of the picture in which lines are drawn, and the values at its edges."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def _line(curve: Curve, frame: _Frame, colour: int) -> str:
    points = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in thinned(curve)]
    if len(points) == 1:
        x, y = points[0].split(",")
        return f'<circle class="c{colour} dot" cx="{x}" cy="{y}" r="3"/>'
    return f'<polyline class="c{colour} line" points="{" ".join(points)}"/>'


def thinned(curve: Curve) -> list[tuple[float, float]]:
    """Reduce a curve to at most 240 points: means of neighbours, at the mean of their steps."""
    each = -(-len(curve.steps) // _POINTS)
    points = []
    for begin in range(0, len(curve.steps), each):
        steps, values = curve.steps[begin : begin + each], curve.values[begin : begin + each]
        points.append((sum(steps) / len(steps), math.fsum(values) / len(values)))
    return points


def _value_axis(ticks: Sequence[float], frame: _Frame) -> str:
    parts = []
    decimals = max(len(f"{tick:.12f}".rstrip("0").partition(".")[2]) for tick in ticks)
    for tick in ticks:
        y = frame.y(tick)
        text = f"{tick:,.{decimals}f}" if decimals <= 4 and abs(ticks[-1]) < 1e7 else number_text(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)


def _step_axis(first: int, last: int, frame: _Frame) -> str:
    steps = sorted({first, *(step for step in map(int, value_ticks(first, last)) if first <= step <= last), last})
    # The numbers at both ends are shown; numbers too close to them are not.
    apart = (last - first) / 10
    shown = [s for s in steps if s in (first, last) or (s - first > apart and last - s > apart)]
    parts = []
    for step in shown:
        anchor = "start" if step == first else "end" if step == last else "middle"
        at = frame.x(step) if last > first else LEFT
        y = HEIGHT - 10
        parts.append(f'<text class="tick" x="{at:.1f}" y="{y}" text-anchor="{anchor}">{number_text(step)}</text>')
    return "".join(parts)


def value_ticks(low: float, high: float) -> list[float]:
    """Return at most seven round values that enclose a range, 1, 2 or 5 times a power of ten apart."""
    if high - low <= _CONSTANT * max(abs(low), abs(high)):
        # The range of a constant curve includes zero, so that it is not empty.
        low, high = min(low, 0.0), max(high, 0.0)
    if max(abs(low), abs(high)) < _NOTHING:
        low, high = 0.0, 1.0
    exponent = math.floor(math.log10((high - low) / 4))
    apart = next(factor * 10.0**exponent for factor in (1, 2, 5, 10) if factor * 10.0**exponent * 4 >= high - low)
    begin, end = math.floor(low / apart), math.ceil(high / apart)
    return [round(n * apart, max(0, 1 - exponent)) for n in range(begin, end + 1)]


def number_text(value: float) -> str:
    """Format a number in few characters: 12,345, 0.125, 1.2e-05."""
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
