"""Every command to a run takes effect even if a role, the overseer or all of it is killed then; nothing is lost."""

from pathlib import Path

import pytest

from tests.support.commanded_run import (
    ALL,
    OVERSEER,
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

CASES = (
    (scale, SCALED),
    (scale, OVERSEER),
    (pause, "env"),
    (resume, OVERSEER),
    (weigh, "env"),
    (drain, "group"),
    (drain, ALL),
    (evaluate, "eval"),
    (roll_back, "infer"),
    (exclude, "learn"),
    (stop_at_step, ALL),
)
"""Each command with one victim, and each victim with one command."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "victim"),
    [pytest.param(command, victim, id=f"{command.__name__}-{victim}") for command, victim in CASES],
)
def test_a_command_holds_over_a_kill_at_its_moment(
    broker: str, run_name: str, tmp_path: Path, command: Command, victim: str
) -> None:
    check_command(broker, run_name, tmp_path, command, victim)
