"""`rollstream ui` shows the runs that it is told to show, from an archive without any broker."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.archived_run import archive_run
from tests.support.page import PageClient
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ((), ["main", "other"]),
        (("--set", "run=other"), ["main", "other"]),
        (("--run", "other"), ["other"]),
    ],
    ids=["all runs", "a setting", "one run"],
)
def test_the_runs_of_an_archive_are_shown_or_those_that_flags_name(
    flags: Sequence[str], shown: Sequence[str], tmp_path: Path
) -> None:
    for run in ("main", "other"):
        archive_run(tmp_path / "archive", 1, run=run)
    command = [sys.executable, "-m", "rollstream", "ui", "--archive", "archive", *flags]
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out) as process:
        try:
            printed = eventually(
                lambda: re.search(r"^page of .*: (http\S+)$", log.read_text(), re.MULTILINE), 60, "URL"
            )
            assert printed is not None
            page = PageClient(printed[1])
            runs = page.json("/api/runs")["runs"]
            assert [(each["run"], each["source"]) for each in runs] == [(run, "archive") for run in shown]
            for run in shown:
                assert page.json(f"/api/runs/{run}/overview")["top"]["rollouts"] == 8
        finally:
            process.terminate()
