"""An outage that lasts longer than roles are patient ends no run: roles that gave up wait until a broker answers."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.infra.broker.broker import LocalBroker
from tests.support.steered_run import SteeredRun
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
OUTAGE_S = 150.0
"""Time in which a role that gave up, and then ended whenever no broker answers for ten seconds, would use up its
restarts. Rollouts of workers are given up after two minutes, transactions after one."""


@pytest.fixture
def overseen(breakable: LocalBroker, run_name: str, tmp_path: Path) -> Iterator[SteeredRun]:
    run = SteeredRun(breakable.bootstrap_servers, run_name, tmp_path)
    try:
        yield run
    finally:
        run.close()


def exits(run: SteeredRun) -> Counter[str]:
    """How often each role ended by itself. A role that waits for records, such as an idle learner, need not give up."""
    return Counter(re.findall(r'"event": "role_exited", "role": "([^"]+)"', run.output))


def test_a_run_outlives_an_outage_in_which_its_roles_give_up(overseen: SteeredRun, breakable: LocalBroker) -> None:
    run = overseen
    run.start()
    run.await_steps(1)
    breakable.kill()
    eventually(lambda: exits(run) or run.process.poll() is not None, 300, "a role that gives up")
    gave_up = time.monotonic()

    def lasted() -> bool:
        return time.monotonic() - gave_up > OUTAGE_S or run.process.poll() is not None

    eventually(lasted, 300, "an outage that would use up the restarts", every_s=0.5)
    assert run.process.poll() is None, run.output
    assert set(exits(run).values()) == {1}, run.output
    for role in exits(run):
        assert f'"event": "role_starting", "role": "{role}", "progress": "no broker answers yet: ' in run.output
    breakable.restart()
    run.await_steps(2)
    run.stop()
    run.check()
