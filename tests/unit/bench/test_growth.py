"""Slopes of costs are right, and what grows too fast is named."""

import pytest

from tests.bench.growth import open_groups
from tests.bench.growth.costs import Costs
from tests.bench.growth.series import Series, collected, report

SIZES = (10.0, 100.0, 1000.0, 10000.0)


def grown(exponent: float, bound: float | None, constant: float = 0.0) -> Series:
    points = [(size, constant + 0.001 * size**exponent) for size in SIZES]
    return collected(f"as {exponent:g}", "things", "s", bound, points)


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_a_slope_is_the_exponent_of_the_growth_and_offends_beyond_its_bound(exponent: float) -> None:
    series = grown(exponent, bound=1)
    assert series.slope == pytest.approx(exponent)
    assert series.offends is (exponent > 1.2)
    assert grown(exponent, bound=0).offends is (exponent > 0.2)


def test_sizes_need_not_rise_evenly() -> None:
    points = [(size, 3 * size**1.5) for size in (1, 2, 50, 70)]
    assert collected("uneven", "things", "s", 1, points).slope == pytest.approx(1.5)


def test_what_every_size_costs_hides_no_growth() -> None:
    assert grown(2.0, bound=1, constant=10.0).offends


def test_a_cost_at_one_size_has_no_slope() -> None:
    assert collected("single", "things", "s", 0, [(7, 3.0)]).slope == 0.0


def test_a_report_names_the_offenders_and_holds_nothing_to_a_bound_that_has_none() -> None:
    text = report([grown(0.0, 0), grown(2.0, 1), grown(1.5, None)], ["2 cores"])
    assert text.endswith("worse than their bounds: as 2")
    assert "none is worse than its bound" in report([grown(1.0, 1)], [])
    assert max(map(len, text.splitlines())) <= 100


def test_series_over_the_same_thing_at_other_sizes_have_a_table_of_their_own() -> None:
    fewer = collected("fewer", "things", "s", 1, [(10.0, 1.0), (100.0, 2.0)])
    assert report([grown(1.0, 1), fewer], []).count("slope") == 2


def test_costs_of_work_are_processor_time_held_to_a_bound_and_wall_time_that_is_shown() -> None:
    costs = Costs("things")
    for size in (1, 2):
        costs.measure("summing", size, 1, lambda: sum(range(300_000)))
    processor, wall = costs.series()
    assert (processor.unit, processor.bound, wall.unit, wall.bound) == ("CPU s", 1, "s", None)
    assert [size for size, _cost in processor.points] == [size for size, _cost in wall.points] == [1, 2]


@pytest.mark.long
def test_costs_with_open_groups_are_measured() -> None:
    listed = open_groups.measure([20, 40])
    assert [series.over for series in listed] == ["open groups"] * 4
    assert all(cost > 0 for series in listed for _size, cost in series.points)
