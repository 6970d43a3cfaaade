"""TransferQueue and Ray as they are, with data on the log: kill -9 and answers, beside their own storage in memory."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.rounds import rounds
from tests.support.runs import RealRun

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PYTHON = ROOT / ".venv" / "transferqueue" / "bin" / "python"
DRIVER = Path(__file__).with_name("transfer_queue_driver.py")
GROUPS, SIZE, CONSUME_AT = 9, 4, 4
KILLS = [("log", "storage"), ("log", "controller"), ("log", "driver"), ("memory", "driver"), ("checkpoint", "driver")]
"""Backends, and the process that is killed. What is in memory is gone with each of them: one stands for three."""


@pytest.fixture
def run(run: RealRun) -> RealRun:
    if not PYTHON.exists():
        pytest.fail("TransferQueue is not installed: run make .venv/transferqueue/.installed", pytrace=False)
    assert run.start("topics", "apply").wait(120) == 0
    return run


def drive(run: RealRun, **task: Any) -> tuple[int, list[dict[str, Any]], str]:
    """Run a driver to its end; return its exit code, the objects it printed, and its errors."""
    task |= {"servers": run.kafka.bootstrap_servers, "run": run.name, "directory": str(run.directory)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    driver = subprocess.run(
        [str(PYTHON), "-P", str(DRIVER), json.dumps(task)],
        cwd=run.directory,
        env={**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    printed = [json.loads(line) for line in driver.stdout.splitlines() if line.startswith("{")]
    return driver.returncode, printed, driver.stderr[-4000:]


def killed_and_restored(run: RealRun, backend: str, killed: str, seed: int) -> dict[str, Any]:
    """Kill a process of a queue with this backend, start the next driver, and return what it has."""
    task = {"backend": backend, "groups": GROUPS, "consume_at": CONSUME_AT, "seed": seed}
    code, printed, errors = drive(run, do="put", kill=killed, **task)
    acknowledged = [line["acknowledged"] for line in printed if "acknowledged" in line]
    assert acknowledged[:GROUPS] == list(range(GROUPS)), errors
    assert (code == -signal.SIGKILL) == (killed == "driver"), errors
    code, restored, errors = drive(run, do="get", **task)
    assert code == 0, errors
    kept = [group for group in acknowledged if group != 0]  # Group 0 was cleared.
    return restored[-1] | {"lost": len(set(kept) - set(restored[-1]["whole"])), "goes_on": len(acknowledged) > GROUPS}


@pytest.mark.parametrize("seed", range(rounds(1)))
@pytest.mark.parametrize(("backend", "killed"), KILLS)
def test_a_queue_on_the_log_loses_nothing_that_was_acknowledged(
    run: RealRun, backend: str, killed: str, seed: int
) -> None:
    outcome = killed_and_restored(run, backend, killed, seed)
    print(json.dumps({"backend": backend, "killed": killed, "seed": seed} | outcome))
    assert outcome["torn"] == []
    assert 0 not in outcome["whole"], "what was cleared does not come back"
    if backend == "log":
        assert outcome["lost"] == 0
        assert outcome["ready"] == outcome["samples"] == SIZE * len(outcome["whole"])
        assert outcome["tags"]
        assert outcome["goes_on"] == (killed == "storage"), "a writer that is killed is started again"
    else:
        # Of memory nothing is left; a checkpoint has what was there when it was made.
        assert outcome["lost"] == GROUPS - 1 - (CONSUME_AT if backend == "checkpoint" else 0)


def test_a_checkpoint_restores_what_was_consumed_and_the_log_what_was_put_since(run: RealRun) -> None:
    task = {"backend": "log", "groups": GROUPS, "consume_at": CONSUME_AT, "seed": 7}
    drive(run, do="put", kill="driver", **task)
    code, printed, errors = drive(run, do="get", from_checkpoint=True, **task)
    assert code == 0, errors
    later = SIZE * (GROUPS - 1 - CONSUME_AT)
    assert printed[-2] == {"samples": later, "without_key": 0, "cleared": 0}
    assert printed[-1]["whole"] == list(range(1, GROUPS))
    # The group that was consumed before the checkpoint is not consumed again.
    assert printed[-1]["ready"] == SIZE * (GROUPS - 2)


def test_the_calls_of_nemo_rl_and_of_verl_are_answered_as_by_storage_in_memory(run: RealRun) -> None:
    """Without their packages: the calls that NeMo-RL's TQDataPlaneClient and verl's agent loop and trainer make."""
    code, printed, errors = drive(run, do="contract")
    assert code == 0, errors
    memory, log = printed
    assert (memory.pop("backend"), log.pop("backend")) == ("memory", "log")
    assert log == memory
    nemo, verl = log["nemo_rl"], log["verl"]
    print(json.dumps(log))
    assert nemo["claims"][0]["keys"] == [], "no sample has the field of the later stage yet"
    assert sorted(key for claimed in nemo["claims"][:3] for key in claimed["keys"]) == ["a", "b", "c"]
    assert nemo["consumed"] == [True, False]
    assert verl["listed"]["p"]["status"] == "finished"
    assert nemo["left"] == verl["left"] == {}
