"""Charts of a report: round values on their axes, lines within their frames, words for those who do not see them."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.report.line_chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curve, chart, value_ticks

VALUES = st.floats(-1e12, 1e12, allow_nan=False)


@given(low=VALUES, more=st.one_of(st.just(0.0), st.floats(1e-6, 1e12)))
def test_ticks_enclose_every_range_and_are_few(low: float, more: float) -> None:
    high = low + more
    ticks = value_ticks(low, high)
    slack = 1e-9 * max(abs(low), abs(high), 1.0)
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack


@pytest.mark.parametrize(("constant", "ticks"), [(0.0, (0.0, 1.0)), (3.0, (0.0, 3.0)), (-2.0, (-2.0, 0.0))])
def test_a_constant_stands_over_zero(constant: float, ticks: tuple[float, float]) -> None:
    actual = value_ticks(constant, constant)
    assert actual[0] <= ticks[0]
    assert actual[-1] >= ticks[1]
    assert 0.0 in actual


@given(values=st.lists(VALUES, min_size=1, max_size=700), first=st.integers(0, 10**6))
def test_lines_stay_within_their_frame(values: list[float], first: int) -> None:
    steps = range(first, first + len(values))
    tree = ET.fromstring(chart("A & <b>", [Curve("x", steps, values), Curve("<y>", steps[:1], values[:1])], 3))
    assert tree.get("role") == "img"
    drawn = [node for node in tree if "line" in (node.get("class") or "").split()]
    points = [tuple(map(float, pair.split(","))) for node in drawn for pair in node.attrib["points"].split()]
    assert len(points) <= 240
    for x, y in points:
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


def test_the_words_of_a_chart_name_its_steps_and_values() -> None:
    svg = chart("Loss", [Curve("loss", [0, 5, 9], [1.5, 1.0, 0.25])], 7)
    assert 'aria-labelledby="t7 d7"' in svg
    assert '<title id="t7">Loss</title>' in svg
    assert "Steps 0 to 9: loss from 1.500 to 0.250" in svg
    assert all(math.isfinite(float(number)) for number in re.findall(r"-?\d+\.\d+", svg))
