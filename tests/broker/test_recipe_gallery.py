"""The cheapest recipes, run as their pages say: they learn, curves are drawn, and an archive is attested."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.record_recipe import record, record_control


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_cheapest_recipe_learns_is_attested_and_draws_its_curve(tmp_path: Path) -> None:
    figures = record("dsort3", tmp_path, [], last_step=240)
    first, last = figures["reward"]
    assert last - first > 0.3
    # `attest check` has confirmed it.
    assert figures["statement"]["run"] == "dsort3"
    assert figures["statement"]["policy"]["step"] == 240
    assert figures["cpu_s"] > 0
    assert figures["memory_mb"] > 0
    assert has_a_line(figures["curve"])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_recipe_of_a_control_task_draws_the_returns_of_its_versions(tmp_path: Path) -> None:
    report = record_control(tmp_path)
    returns = [value for _version, value in sorted(report["returns"].items(), key=lambda item: int(item[0]))]
    assert len(returns) == report["versions"]
    assert returns[-1] - returns[0] > 1
    assert has_a_line(report["curve"])


def has_a_line(svg: str) -> bool:
    return ElementTree.fromstring(svg).find("{http://www.w3.org/2000/svg}polyline") is not None
