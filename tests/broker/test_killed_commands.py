"""Every command to a run takes effect even if its overseer, or all of it, is killed at that moment; nothing is lost."""

from pathlib import Path

import pytest

from tests.support.commanded_run import (
    ALL,
    OVERSEER,
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
    *((command, OVERSEER) for command in (scale, pause, resume, weigh, drain, evaluate, roll_back, exclude)),
    *((command, ALL) for command in (scale, pause, stop_at_step, drain)),
]


@pytest.mark.long
def test_a_command_holds_over_a_kill_of_the_overseer(broker: str, run_name: str, tmp_path: Path) -> None:
    check_command(broker, run_name, tmp_path, stop_at_step, OVERSEER)


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "victim"),
    [pytest.param(command, victim, id=f"{command.__name__}-{victim}") for command, victim in CASES],
)
def test_a_command_holds_over_a_kill_at_its_moment(
    broker: str, run_name: str, tmp_path: Path, command: Command, victim: str
) -> None:
    check_command(broker, run_name, tmp_path, command, victim)
