"""The drawing of a demo of scaling shows the figures that it was given, as text and as a picture."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.run.scale_drawing import axis_top, charts, picture, text
from rollstream.pipeline.run.scale_series import ScalePoint, ScaleSeries
from tests.support.pictures import shown_lines

COUNTS = st.integers(0, 10**7)


@st.composite
def series(draw: st.DrawFn) -> ScaleSeries:
    steps = draw(st.lists(st.tuples(COUNTS, COUNTS, COUNTS, st.integers(0, 64)), min_size=1, max_size=30))
    produced = read = 0
    points = []
    for number, (more, fewer, lag, processes) in enumerate(steps):
        produced, read = produced + more, read + fewer
        points.append(
            ScalePoint(at_s=1.5 * number, produced=produced, read=read, lag=lag, processes=processes, wanted=processes)
        )
    return ScaleSeries(tuple(points))


@given(series())
def test_the_picture_shows_the_figures_it_was_given(drawn: ScaleSeries) -> None:
    shown = shown_lines(picture(drawn, "a & b", ["<one> line"]))
    assert list(shown) == ["lag", "processes", "rollouts written", "records read"]
    expected: dict[str, Sequence[float]] = {
        "lag": drawn.lags,
        "processes": drawn.processes,
        "rollouts written": drawn.produced_per_s,
        "records read": drawn.read_per_s,
    }
    for chart in charts(drawn):
        for line in chart.lines:
            values = shown[line.name]
            # A line in steps has corners in addition to its points.
            at = dict(values)
            near = pytest.approx([*expected[line.name]], abs=chart.top / 1000)
            assert [at[time] for time in sorted(at)][: len(drawn.points)] == near
            assert max(value for _time, value in values) <= chart.top * 1.001


def test_processes_change_in_steps() -> None:
    points = [
        ScalePoint(at_s=float(at), produced=at, read=at, lag=0, processes=n, wanted=n) for at, n in enumerate((1, 1, 3))
    ]
    drawn = shown_lines(picture(ScaleSeries(tuple(points)), "steps"))["processes"]
    assert [(round(at, 1), round(value, 2)) for at, value in drawn] == [(0, 1), (1, 1), (2, 1), (2, 3)]


@given(series(), st.integers(20, 200))
def test_the_text_fits_and_names_the_newest_figures(drawn: ScaleSeries, width: int) -> None:
    lines = text(drawn, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 16
    if width >= 100:
        assert f"lag {drawn.lags[-1]:,.0f}" in lines[0]
        assert f"processes {drawn.processes[-1]:.0f}" in lines[5]


def test_an_area_rises_with_its_values() -> None:
    points = [ScalePoint(at_s=float(n), produced=0, read=0, lag=n, processes=1, wanted=1) for n in range(41)]
    rows = text(ScaleSeries(tuple(points)), 60)[1:5]
    heights = [sum(row[12:].ljust(50)[column] != " " for row in rows) for column in range(41)]
    assert heights[0] == 0
    assert heights[-1] == 4
    assert all(before <= after for before, after in pairwise(heights))


@given(st.floats(0, 1e12))
def test_an_axis_ends_at_or_a_little_above_the_highest_value(most: float) -> None:
    assert most <= axis_top(most)
    assert axis_top(most) <= max(1.0, 2.01 * most)


def test_a_picture_of_nothing_is_a_picture() -> None:
    root = ElementTree.fromstring(picture(ScaleSeries(), "nothing"))
    assert root.tag.endswith("svg")
    assert text(ScaleSeries(), 80)[0].startswith("records that wait")
