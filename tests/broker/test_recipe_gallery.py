"""The cheapest recipe, run as its page says: it learns, its archive is attested, and its curve is drawn."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.record_recipe import record


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_cheapest_recipe_learns_is_attested_and_draws_its_curve(tmp_path: Path) -> None:
    figures = record("dsort3", tmp_path, [])
    first, last = figures["reward"]
    assert last - first > 0.3
    # `attest check` has confirmed it.
    assert figures["statement"]["run"] == "dsort3"
    assert figures["statement"]["policy"]["step"] == 600
    assert figures["cpu_s"] > 0
    assert figures["memory_mb"] > 0
    picture = ElementTree.fromstring(figures["curve"])
    assert picture.find("{http://www.w3.org/2000/svg}polyline") is not None
