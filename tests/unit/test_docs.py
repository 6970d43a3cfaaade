"""Figures and settings files that the documentation shows are right; `python -m tests.house` checks the rest of it."""

import statistics
from pathlib import Path

import pytest

from rollstream.consumers.grouping.core.estimators import Outcomes, rloo, rloo_normalized
from rollstream.pipeline.config import RunConfig, load
from tests.support.paths import ROOT


def test_the_figures_of_the_trap_are_right() -> None:
    page = (ROOT / "docs" / "grouping.md").read_text(encoding="utf-8")
    text = " ".join(page.split("\n## Advantages\n")[1].split("\n## ")[0].split())
    one, two = [1.0] + [0.0] * 7, [1.0] * 2 + [0.0] * 6
    of_others = statistics.pstdev(two[1:])
    alone, both = (Outcomes(rewards=tuple(rewards), lengths=(1,) * 8) for rewards in (one, two))
    assert statistics.pstdev(one[1:]) == 0
    assert rloo(alone)[0] == 1.0
    assert f"deviate by {of_others:.2f}, and each gets {rloo(both)[0] / of_others:.2f}" in text
    assert f"it is {rloo_normalized(alone)[0]:.2f} and {rloo_normalized(both)[0]:.2f}" in text


@pytest.mark.parametrize(
    "path",
    [
        path
        for place in ("examples/**/*.toml", "pipeline/*.toml", "recipes/*/run.toml")
        for path in sorted(ROOT.glob(place))
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_settings_files_are_valid_as_they_are(path: Path) -> None:
    # What examples/control/run.py adds.
    flags = ["collect.player=play.py:play", "labeling.labeler=reach.py:judge"] if path.parent.name == "control" else []
    # Also whether flow control lets a step begin is checked as the file is read.
    assert load(path, flags=flags) != RunConfig()
    assert path.parent.parent.name != "recipes" or (path.parent / "README.md").is_file()
