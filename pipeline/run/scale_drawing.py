"""Draws a demo of scaling: as text while it happens, and as a picture (SVG) of the whole. Pure.

Three panels share one time axis: waiting records; grouping processes; rollouts written and records read per second.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rollstream.pipeline.run.scale_series import ScaleSeries

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ROWS = 4
_LABEL = 11
"""Width of the numbers to the left of a panel of text."""

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP = 900, 150, 70, 20, 60, 50
"""Sizes and margins of the picture, in pixels."""
_GRAY, _DARK = "#d0d7de", "#24292f"


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    name: str
    values: tuple[float, ...]
    color: str
    steps: bool = False
    """Whether to draw steps, because each value holds until the next value, like a number of processes."""


@dataclass(frozen=True)
class Chart:
    """One panel."""

    title: str
    lines: tuple[Line, ...]

    @property
    def top(self) -> float:
        """Value at the upper end of the axis."""
        return axis_top(max((value for line in self.lines for value in line.values), default=0.0))


def axis_top(most: float) -> float:
    """Return the end of an axis that includes a value: 1, 2, 4, 5 or 8 times a power of ten."""
    if most <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 4, 5, 8, 10, 20) if step * power >= most)


def charts(series: ScaleSeries) -> tuple[Chart, ...]:
    """Return the panels of a series."""
    return (
        Chart("records that wait (lag)", (Line("lag", series.lags, "#cf222e"),)),
        Chart("grouping processes", (Line("processes", series.processes, "#8250df", steps=True),)),
        Chart(
            "throughput, a second",
            (
                Line("rollouts written", series.produced_per_s, "#0969da"),
                Line("records read", series.read_per_s, "#1a7f37"),
            ),
        ),
    )


# ---------------------------------------------------------------------- text


def text(series: ScaleSeries, width: int) -> list[str]:
    """Return the panels as lines of text, at most `width` wide."""
    lines: list[str] = []
    for chart in charts(series):
        newest = ", ".join(f"{line.name} {line.values[-1]:,.0f}" for line in chart.lines if line.values)
        lines.append(f"{chart.title}: {newest}"[:width])
        lines += area(chart.lines[-1].values, width - _LABEL - 1, chart.top)
    return [*lines, f"{'':{_LABEL}} 0 s{f'{series.seconds:.0f} s':>{max(0, width - _LABEL - 4)}}"[:width]]


def area(values: Sequence[float], width: int, top: float) -> list[str]:
    """Return an area chart as a few rows of text, with at most `width` columns and its scale to the left."""
    columns = [max(bin_) for bin_ in _bins(values, width)]
    rows = []
    for row in range(_ROWS - 1, -1, -1):
        eighths = (round(min(max(value / top * _ROWS - row, 0.0), 1.0) * 8) for value in columns)
        label = f"{top * (row + 1) / _ROWS:,.0f}" if row == _ROWS - 1 else "0" if row == 0 else ""
        rows.append(f"{label:>{_LABEL}} {''.join(_BLOCKS[eighth] for eighth in eighths)}".rstrip())
    return rows


def _bins(values: Sequence[float], width: int) -> list[Sequence[float]]:
    """Split the values into `width` slices, or into slices of one value each if there are fewer values."""
    count = min(len(values), max(width, 1))
    return [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]


# ---------------------------------------------------------------------- picture


def picture(series: ScaleSeries, title: str, lines: Sequence[str] = ()) -> str:
    """Return an SVG of the panels below a title and lines of text."""
    panels = charts(series)
    top = TOP + 16 * len(lines)
    height = top + len(panels) * (PANEL_HEIGHT + GAP)
    body = [_text(LEFT, 26, title, size=18, weight="bold")]
    body += [_text(LEFT, 46 + 16 * number, line) for number, line in enumerate(lines)]
    for number, chart in enumerate(panels):
        body += _panel(chart, series, top + number * (PANEL_HEIGHT + GAP))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(chart: Chart, series: ScaleSeries, y: float) -> list[str]:
    """Draw a panel whose plot begins at `y`; attributes of the SVG element hold the scale, too."""
    end_s = axis_top(series.seconds) if series.seconds <= 10 else math.ceil(series.seconds / 20) * 20.0
    room = WIDTH - LEFT - RIGHT
    parts = [
        f'<g class="panel" data-top="{chart.top:g}" data-end="{end_s:g}" data-y="{y:g}">',
        _text(LEFT, y - 8, chart.title, size=13, weight="bold"),
    ]
    for share in (0.0, 0.5, 1.0):
        level = y + PANEL_HEIGHT * (1 - share)
        parts.append(_rule(LEFT, level, WIDTH - RIGHT, level))
        parts.append(_text(LEFT - 6, level + 4, f"{chart.top * share:,.10g}", anchor="end"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + room * share
        parts.append(_rule(x, y, x, y + PANEL_HEIGHT))
        parts.append(_text(x, y + PANEL_HEIGHT + 15, f"{end_s * share:g} s", anchor="middle"))
    right = float(WIDTH - RIGHT)
    for line in reversed(chart.lines):
        parts.append(_text(right, y - 8, line.name, color=line.color, anchor="end"))
        right -= 7.0 * len(line.name) + 16
    for line in chart.lines:
        points = " ".join(
            f"{LEFT + room * at_s / end_s:.2f},{y + PANEL_HEIGHT * (1 - value / chart.top):.2f}"
            for at_s, value in _corners(series.times, line)
        )
        parts.append(
            f'<polyline data-name="{escape(line.name)}" points="{points}" fill="none" stroke="{line.color}" '
            'stroke-width="2" stroke-linejoin="round"/>'
        )
    return [*parts, "</g>"]


def _corners(times: Sequence[float], line: Line) -> list[tuple[float, float]]:
    """Return the points of a line; a line in steps also gets a corner at each change of its value."""
    corners: list[tuple[float, float]] = []
    for at_s, value in zip(times, line.values, strict=True):
        if line.steps and corners and corners[-1][1] != value:
            corners.append((at_s, corners[-1][1]))
        corners.append((at_s, value))
    return corners


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{_GRAY}" stroke-width="1"/>'


def _text(
    x: float, y: float, text: str, *, size: int = 12, color: str = _DARK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
