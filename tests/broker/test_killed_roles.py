"""Every command to a run takes effect even if processes of a role are killed at that moment, and nothing is lost."""

from pathlib import Path

import pytest

from tests.support.commanded_run import (
    SCALED,
    Command,
    check_command,
    drain,
    evaluate,
    exclude,
    pause,
    resume,
    roll_back,
    scale,
    stop_at_step,
    weigh,
)

CASES = [
    (scale, SCALED),
    *((command, "env") for command in (pause, resume, weigh, drain)),
    *((command, "learn") for command in (stop_at_step, drain, roll_back, exclude)),
    *((command, "group") for command in (drain, exclude)),
    (evaluate, "eval"),
    (roll_back, "infer"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "victim"),
    [pytest.param(command, victim, id=f"{command.__name__}-{victim}") for command, victim in CASES],
)
def test_a_command_holds_over_a_kill_at_its_moment(
    broker: str, run_name: str, tmp_path: Path, command: Command, victim: str
) -> None:
    check_command(broker, run_name, tmp_path, command, victim)
