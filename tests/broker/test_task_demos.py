"""Demos of tasks with recipes of their own, in full: each keeps the promise of its recipe. They take minutes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.broker.test_demo import environment

HOUR_S = 3600


def demo(task: str, compiled: Path, directory: Path, broker: str) -> dict[str, Any]:
    """Run the demo of a task, which must pass, and return its report."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", "demo", "--task", task, "--json", "--keep", "--data", directory],
        env=environment(compiled, KAFKA_BOOTSTRAP_SERVERS=broker),
        capture_output=True,
        text=True,
        timeout=HOUR_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["passed"]
    assert report["success_last"] - report["success_first"] >= report["needed_gain"] >= 0.3
    assert report["reward_last"] > report["reward_first"]
    assert report["heldout_prompts_last"] > 0
    assert report["ledger"]["balanced"]
    return report


@pytest.mark.long
@pytest.mark.timeout(HOUR_S + 600)
def test_an_agent_learns_to_call_a_tool(compiled: Path, tmp_path: Path, broker: str) -> None:
    report = demo("tools", compiled, tmp_path, broker)
    assert report["demonstrated"] == 0.5
    # Most episodes call the policy twice, and these calls are in rollouts.
    calls = report["ledger"]["calls"]
    assert calls["in_rollouts"] > 1.5 * report["rollouts"]


@pytest.mark.long
@pytest.mark.timeout(HOUR_S + 600)
def test_code_is_learned_from_the_tests_that_it_passes(compiled: Path, tmp_path: Path, broker: str) -> None:
    report = demo("coding", compiled, tmp_path, broker)
    assert report["demonstrated"] == 0.0
    assert report["heldout_success_last"] > report["heldout_success_first"]
