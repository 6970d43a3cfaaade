"""`rollstream run` is killed with -9 and started again: its processes go on meanwhile, and it adopts them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.steered_run import VALUES, SteeredRun
from tests.support.waiting import eventually

ROLES = ("env", "group", "infer", "learn")


@pytest.fixture
def overseen(broker: str, run_name: str, tmp_path: Path) -> Iterator[SteeredRun]:
    # Each command of the test takes seconds, on a busy machine more than the default of 30 s together.
    run = SteeredRun(broker, run_name, tmp_path, values={**VALUES, "supervisor.adoption_s": 300})
    try:
        yield run
    finally:
        run.close()


def processes(run: SteeredRun) -> dict[str, list[int]]:
    return {role: sorted(run.pids(role)) for role in ROLES}


@pytest.mark.long
def test_an_overseer_that_is_started_again_adopts_what_runs(overseen: SteeredRun) -> None:
    run = overseen
    run.start()
    run.await_steps(1)
    before = processes(run)
    run.kill()
    reached = run.top()["step"]
    eventually(lambda: run.top()["step"] >= reached + 2, 300, "steps without an overseer")
    run.start()
    assert "4 of 4 processes go on" in run.output
    assert processes(run) == before
    # The end of a learner that somebody else stops is not the end of the run.
    [learner] = run.pids("learn")
    os.kill(learner, signal.SIGTERM)
    run.await_output('"event": "role_ready", "role": "learn"')
    run.await_steps(1)
    before = processes(run)
    assert before["learn"] != [learner]
    # The overseer watches them as before, and starts one that died while it was gone.
    run.kill_role("group")
    run.await_output('"event": "role_ready", "role": "group-0"')
    assert run.pids("group") != before["group"]
    run.kill()
    run.kill_role("env")
    run.start()
    assert "3 of 4 processes go on" in run.output
    run.await_steps(2)
    kept = processes(run)
    assert (kept["infer"], kept["learn"]) == (before["infer"], before["learn"])
    left = set(run.pids())
    # With other settings, no process is kept that follows the old ones.
    run.kill()
    run.start(learner__max_steps=99999)
    assert "go on" not in run.output
    assert not left & set(run.pids())
    run.await_steps(1)
    run.stop()
    assert run.pids() == []
    run.check()
