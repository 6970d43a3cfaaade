"""Hostile input into everything that takes input and needs no broker: each has one fate, and none ends a process.

`HOSTILE_INPUTS` is the length of the long form, over all targets; `HOSTILE_SEED` its first seed.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hostile.__main__ import SHARES
from tests.hostile.flood_targets import Outcome, flood, peak_mib, pieces
from tests.hostile.targets import TARGETS
from tests.support.paths import ROOT

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
    inputs = target.short // 2 if length == "short" else INPUTS * target.share // SHARES
    outcome = Outcome.together(flood(target, count, seed, tmp_path) for seed, count in pieces(target, inputs, SEED))
    with capsys.disabled():
        print(f"\n{outcome}", end=" ")
    assert not outcome.failure
    assert peak_mib() - before_mib < MOST_MIB


def test_the_command_gives_each_piece_to_a_process_and_adds_their_fates(tmp_path: Path) -> None:
    name, inputs = "parameters of the page", 30_000
    target = TARGETS[name]
    parts = pieces(replace(target, piece=100), 250, 7)
    assert parts == [(7, 100), (8, 100), (9, 50)]
    alone = flood(target, inputs * target.share // SHARES, 7, tmp_path)
    command = [sys.executable, "-m", "tests.hostile", "--only", name, "--inputs", str(inputs), "--seed", "7"]
    output = subprocess.run([*command, "--processes", "2"], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    # Times and memory follow.
    assert output.startswith(str(alone).partition(", seed 7")[0])
    assert f"{alone.fates.total():,} inputs, 0 of 1 targets failed" in output
    total = Outcome.together([alone, flood(target, 10, 8, tmp_path)])
    assert (total.seeds, total.fates.total()) == (range(7, 9), inputs * target.share // SHARES + 10)
