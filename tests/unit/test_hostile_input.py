"""Hostile input into everything that takes input and needs no broker: each has one fate, and none ends anything.

`HOSTILE_INPUTS` is the length of the long form, over all targets; `HOSTILE_SEED` its first seed.
"""

import os
from pathlib import Path

import pytest

from tests.hostile.__main__ import SHARES
from tests.hostile.flood_targets import flood, peak_mib
from tests.hostile.targets import TARGETS

INPUTS = int(os.environ.get("HOSTILE_INPUTS", "400000"))
SEED = int(os.environ.get("HOSTILE_SEED", "1"))
MOST_MIB = 500
"""Most memory that a target may add to this process; the fold alone may hold 64 MiB of groups and as much of finished
ones, and an archive the rows of a commit."""


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("length", ["short", pytest.param("long", marks=pytest.mark.long)])
def test_every_input_has_one_fate(name: str, length: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = TARGETS[name]
    before_mib = peak_mib()
    outcome = flood(target, target.short if length == "short" else INPUTS * target.share // SHARES, SEED, tmp_path)
    with capsys.disabled():
        print(f"\n{outcome}", end=" ")
    assert not outcome.failure
    assert peak_mib() - before_mib < MOST_MIB
