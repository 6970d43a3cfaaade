"""A real `rollstream run` whose learner has several processes or devices and is killed; its steps are run again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.steered_run import VALUES, SteeredRun


@pytest.mark.long
@pytest.mark.parametrize(("processes", "sequence"), [(2, 1), (4, 1), (1, 2)])
def test_a_run_with_processes_of_a_learner_goes_on_after_kill_9_and_its_steps_have_the_same_bits_again(
    broker: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, sequence: int
) -> None:
    values = {**VALUES, "learner.processes": processes, "learner.checkpoint.every_steps": 2}
    if sequence > 1:
        # Devices of one process share the tokens of each row; a mesh of fewer devices is refused.
        monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={sequence}")
        values["learner.mesh.sequence"] = sequence
    run = SteeredRun(broker, run_name, tmp_path, values=values)
    try:
        run.start()
        run.await_processes(learn=processes)
        run.await_steps(3)
        for member in (0, -1):
            os.kill(run.pids("learn")[member], signal.SIGKILL)
            run.await_steps(3)
            run.await_processes(learn=processes)
        last = run.top()["step"] + 2
        run.say("stop", "--at-step", str(last))
        assert run.process.wait(600) == 0, run.output
        run.check()
        last = run.top()["step"]  # The learner may have passed the step before it was told.
    finally:
        run.close()
    settings = str(tmp_path / "runs" / run_name / "run.toml")
    command = [sys.executable, "-P", "-m", "rollstream", "retrain", "--config", settings, "--json"]
    command += ["--from-step", str(last - 2)]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    answer = json.loads(again.stdout)
    assert answer["same"]
    assert answer["steps"]
