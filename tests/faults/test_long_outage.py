"""An outage that lasts longer than roles are patient ends no run: roles that gave up wait until a broker answers."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.infra.broker import LocalBroker
from tests.support.steered_run import SteeredRun
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
GIVING_UP = ("learn", "group-0")
"""Roles that give up a transaction after a minute without an answer."""
RESTARTS_S = 4 * 12.0
"""Time in which a role that ended whenever no broker answers for ten seconds would use up its restarts."""


@pytest.fixture
def overseen(breakable: LocalBroker, run_name: str, tmp_path: Path) -> Iterator[SteeredRun]:
    run = SteeredRun(breakable.bootstrap_servers, run_name, tmp_path)
    try:
        yield run
    finally:
        run.close()


def test_a_run_outlives_an_outage_in_which_its_roles_give_up(overseen: SteeredRun, breakable: LocalBroker) -> None:
    run = overseen
    run.start()
    run.await_steps(1)
    breakable.kill()
    for role in GIVING_UP:
        run.await_output(f'"event": "role_exited", "role": "{role}"')
        run.await_output(f'"event": "role_starting", "role": "{role}", "progress": "no broker answers yet"')
    gave_up = time.monotonic()

    def lasted() -> bool:
        return time.monotonic() - gave_up > RESTARTS_S or run.process.poll() is not None

    eventually(lasted, 300, "an outage that would use up the restarts", every_s=0.5)
    assert run.process.poll() is None, run.output
    for role in GIVING_UP:
        assert run.output.count(f'"event": "role_exited", "role": "{role}"') == 1
    breakable.restart()
    run.await_steps(2)
    run.stop()
    run.check()
