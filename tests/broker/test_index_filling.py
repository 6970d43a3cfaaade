"""The page's index goes on after the process that fills it is killed, and has each rollout once."""

import os
import signal

import psutil
import pytest

from tests.browser.served_run import url_of
from tests.support.page import PageClient
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

KILLS = 2


@pytest.mark.long
def test_the_process_that_fills_an_index_is_killed_and_another_goes_on(real_run: RealRun) -> None:
    run = real_run.prepare()
    served = run.start("ui")
    page = PageClient(url_of(run, served))
    listing = f"/api/runs/{run.name}/rollouts?limit=1"

    def filler() -> int:
        spawned = (each for each in psutil.Process(served.pid).children() if "spawn_main" in " ".join(each.cmdline()))
        return next((child.pid for child in spawned), 0)

    def all_indexed() -> bool:
        assert served.poll() is None, run.log_of(served)
        answer = page.get(listing)
        return answer.status == 200 and answer.json["matching"] == sent

    sent, killed = 0, 0
    page.get(listing)  # Nothing is indexed before somebody looks at the run.
    for kill in range(KILLS):
        run.send(rollout(f"x{kill}.{example}", member) for example in range(500) for member in range(4))
        sent += 2000
        killed = eventually(lambda before=killed: (pid := filler()) != before and pid, 60, "a process at work")  # type: ignore[misc]
        os.kill(killed, signal.SIGKILL)
        assert page.get("/api/runs").status == 200
    eventually(all_indexed, 120, "all rollouts are indexed, each once")
    assert run.log_of(served).count("index_process_lost") == KILLS
