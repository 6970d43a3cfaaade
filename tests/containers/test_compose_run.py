"""A run in containers as docs/deploy.md shows it: built, written, up, trained to its end, judged, stopped."""

from pathlib import Path

import pytest

from tests.containers.compose_run import SMALLER, ContainedRun, contained_run, docker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]


def end(run: ContainedRun) -> None:
    """The learner ends by itself, the books close, and everything stops within its grace period."""
    eventually(lambda: run.ended("learn") is not None, 1800, "the learner to have made its last step", every_s=1.0)
    assert run.ended("learn") == 0
    # An open transaction may still hide a record, so stop everything that writes records for grouping first.
    run.stop(*(name for name in run.roles if name.startswith(("env", "group"))))
    run.tool("ledger")
    run.tool("verify")
    assert run.evidence()["findings"] == []
    run.stop(*(name for name in run.roles if not name.startswith(("env", "group", "learn"))))
    run.stop(*run.brokers)
    assert run.ended("topics") == 0
    assert run.troubles() == {}


def test_compose_up_runs_the_demo_to_its_end(local_images: str, run_name: str, tmp_path: Path) -> None:
    with contained_run(
        tmp_path, run_name, f"--kafka-image={local_images}", *SMALLER, "--set=learner.max_steps=20"
    ) as run:
        end(run)
        run.compose("down", "--volumes")
        of_project = f"--filter=label=com.docker.compose.project={run_name}"
        left = [docker(what, "ls", "--quiet", of_project) for what in ("network", "volume")]
        assert [*left, docker("ps", "--all", "--quiet", of_project)] == ["", "", ""]


def test_a_run_on_three_brokers_outlives_the_kill_of_one(local_images: str, run_name: str, tmp_path: Path) -> None:
    with contained_run(
        tmp_path, run_name, f"--kafka-image={local_images}", *SMALLER, "--brokers=3", "--set=learner.max_steps=100"
    ) as run:
        killed = run.inspect("broker-2")["Id"]
        docker("kill", killed)
        run.await_steps(20, "without one broker")
        docker("start", killed)
        end(run)
