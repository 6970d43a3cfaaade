"""How costs grow is still measured, with sizes so small that figures mean nothing, and what grows too fast is named."""

import json

import pytest

from tests.bench.growth import open_groups
from tests.bench.growth.__main__ import main
from tests.bench.growth.series import Series, collected, report


def grown(exponent: float, bound: float, constant: float = 0.0) -> Series:
    points = [(size, constant + 0.001 * size**exponent) for size in (10.0, 100.0, 1000.0, 10000.0)]
    return collected(f"as {exponent:g}", "things", "s", bound, points)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_a_slope_is_the_exponent_of_the_growth_and_offends_beyond_its_bound(exponent: float) -> None:
    series = grown(exponent, bound=1)
    assert series.slope == pytest.approx(exponent)
    assert series.offends is (exponent > 1.2)
    assert grown(exponent, bound=0).offends is (exponent > 0.2)


def test_what_every_size_costs_hides_no_growth() -> None:
    assert grown(2.0, bound=1, constant=10.0).offends


def test_a_report_names_the_offenders() -> None:
    text = report([grown(0.0, 0), grown(2.0, 1)], ["2 cores"])
    assert text.endswith("worse than their bounds: as 2")
    assert "none is worse than its bound" in report([grown(1.0, 1)], [])
    assert max(map(len, text.splitlines())) <= 100


def test_costs_with_open_groups_are_measured() -> None:
    listed = open_groups.measure([20, 40])
    assert [series.over for series in listed] == ["open groups"] * 4
    assert all(cost > 0 for series in listed for _size, cost in series.points)


@pytest.mark.long
def test_every_cost_is_measured_on_a_real_broker(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "--open-groups": ("100", "200"),
        "--partitions": ("1", "2"),
    }
    assert main(["--json", *(word for flag, values in sizes.items() for word in (flag, *values))]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    assert {series["over"] for series in document["series"]} == {"open groups", "partitions"}
    assert "a second one joins" in {series["name"] for series in document["series"]}
    assert all(len(series["points"]) == 2 and series["points"][1][1] > 0 for series in document["series"])
