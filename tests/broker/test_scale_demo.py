"""`rollstream demo --scale` as a user starts it, with a shorter load: grouping grows and shrinks, and reads once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.pipeline.report.line_chart import number_text

SHORT = (
    "--set=demo.scale.low_s=4",
    "--set=demo.scale.ramp_s=5",
    "--set=demo.scale.high_s=15",
    "--set=grouper.autoscale.cooldown_s=6",
)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLSTREAM", "KAFKA_"))}
    command = [sys.executable, "-P", "-m", "rollstream", "demo", "--scale", *arguments, *SHORT]
    return subprocess.run(command, env=plain, capture_output=True, text=True, timeout=1500)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_processes_go_up_and_down_again_and_nothing_is_read_twice(tmp_path: Path) -> None:
    done = demo("--json", "--seed", "3", "--data", str(tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    counts = [count for _at_s, count in report["processes"]]
    assert counts[0] == counts[-1] == 1
    assert max(counts) == report["most_processes"] > 1
    assert report["read"]["twice"] == report["read"]["missing"] == 0
    assert sum(report["rollouts"].values()) == report["written"] > 1000
    assert report["rollouts"]["dropped: cancelled"] > 0
    assert report["ledger"]["balanced"]
    assert report["verify"]["mismatches"] == 0
    assert report["handovers"]
    assert {len(change["taker"].split("/")) for change in report["handovers"]} == {3}
    check_picture(report)
    # Without a terminal, it reports its progress line by line.
    assert "1 -> " in done.stderr
    assert "processes 1 of 1 wanted" in done.stderr
    left = [process for process in psutil.process_iter() if str(tmp_path) in " ".join(arguments_of(process))]
    assert left == []


def check_picture(report: dict[str, Any]) -> None:
    """The picture shows what the report says."""
    picture = Path(report["places"]["picture"]).read_text()
    for name, key in (("lag", "lag"), ("processes", "processes")):
        values = [point[key] for point in report["points"]]
        figures = "".join(f"<td>{number_text(value)}</td>" for value in (values[0], min(values), max(values)))
        assert f'{name}</th>{figures}<td data-value="{float(values[-1])!r}">' in picture


def arguments_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
