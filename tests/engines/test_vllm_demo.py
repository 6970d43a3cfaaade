"""The demo with a real vLLM as its inference server: it is started, follows the learner, and is ended."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.vllm_server import ENVIRONMENT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("engine", ["vllm", "vllm-plugin"])
def test_the_demo_learns_from_what_vllm_sampled_with_the_versions_of_the_learner(engine: str, tmp_path: Path) -> None:
    python = ENVIRONMENT / "bin" / "python"
    demo = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "rollstream", "demo", "--json", "--steps", "8", "--data", str(tmp_path)),
            *("--engine", engine, "--engine-python", str(python), "--set", "supervisor.ready_timeout_s=900"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=1700,
    )
    assert demo.returncode == 0, demo.stderr[-3000:] + demo.stdout[-3000:]
    report = json.loads(demo.stdout.splitlines()[-1])
    assert report["passed"], report["failures"]
    assert (report["steps"], report["verify"]["mismatches"], report["ledger"]["balanced"]) == (8, 0, True)
    use = report["engine"]
    assert (use["engine"], use["unnamed"], use["published"]) == (engine, 0, 9)
    assert use["versions"] >= 3
    assert sum(use["rollouts_by_versions"].values()) == report["rollouts"] >= 8 * 256
    assert (report["heldout_version_first"], report["heldout_version_last"]) == (0, 8)
    assert {fault["role"] for fault in report["faults"]} > {"learn"}, "and it recovered"
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(_words(process))]
    assert left == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
