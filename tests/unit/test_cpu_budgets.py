"""The report at the end of a run has the CPU seconds of every worker, by layer."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_budgets import BUDGETS, layer_of
from tests.support.paths import ROOT

BUSY = """
import subprocess, sys, time
def test_busy():
    end = time.process_time() + 0.5
    while time.process_time() < end: pass
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"])
"""


@pytest.mark.parametrize("workers", [pytest.param([], marks=pytest.mark.long), ["-n", "1"]])
def test_seconds_of_a_test_and_of_its_children_are_in_the_report(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_planted.py").write_text(BUSY)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(
        [*command, "-p", "tests.conftest", *workers], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    report = done.stdout.partition("CPU seconds by layer")[2]
    [line] = [line for line in report.splitlines() if line.startswith("real tier")]
    assert float(line.split()[2]) > 0.5, done.stdout
    assert "collection" in report


def test_every_layer_has_a_budget() -> None:
    files = ("unit/topics/a", "unit/consumers/grouping/a", "unit/consumers/models/a", "model/a", "broker/a")
    assert [layer_of(file) for file in files] == [*BUDGETS][:5]
