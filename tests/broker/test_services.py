"""Service ports of a real run: each process is alive while its loop turns, ready until it is asked to stop."""

import json
import os
import signal

import pytest

from rollstream.infra.ports import free_port_row
from tests.broker.test_control_run import book_of, start
from tests.support.probes import probe
from tests.support.runs import RealRun
from tests.support.waiting import eventually

LABELER = '''
import time
from pathlib import Path


def patient(trajectory):
    """Labels once the file `labels` is there, and goes on waiting for it until then."""
    from counting import judge

    while not Path("labels").exists():
        time.sleep(0.05)
    return judge(trajectory)
'''


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    from tests.broker.test_control_run import COUNTING

    folder = real_run.directory / "task"
    folder.mkdir()
    (folder / "counting.py").write_text(COUNTING)
    (folder / "labeler.py").write_text(LABELER)
    real_run.python_path = (folder,)
    return real_run


def test_a_loop_that_is_stuck_is_not_alive_and_who_is_asked_to_stop_is_not_ready_and_loses_nothing(
    run: RealRun,
) -> None:
    base = free_port_row("127.0.0.1", 5)
    settings = {"service__port": base, "service__stall_s": 5, "supervisor__stop_timeout_s": 300}
    running = start(run, labeling__labeler="labeler:patient", collect__trajectories=0, **settings)
    listed = run.directory / "runs" / run.name / "targets.json"
    eventually(lambda: len(json.loads(listed.read_text())) == 5, 120, "a port for every process")
    urls = {e["labels"]["process"]: f"http://{e['targets'][0]}" for e in json.loads(listed.read_text())}
    assert set(urls) == {"supervisor", "fill", "label-0", "collect-0", "collect-1"}
    assert urls["supervisor"].endswith(f":{base}")

    for url in urls.values():
        eventually(lambda url=url: probe(f"{url}/readyz") == (200, "ok\n"), 120, f"{url} to be ready")
    eventually(lambda: probe(f"{urls['label-0']}/livez")[0] == 503, 120, "the labeler to be stuck")
    assert "labeling: no progress for" in probe(f"{urls['label-0']}/livez")[1]
    others = {name: probe(f"{url}/livez") for name, url in urls.items() if name != "label-0"}
    assert set(others.values()) == {(200, "ok\n")}, others

    os.kill(pid_of(run, "fill"), signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        probe(f"{urls['fill']}/livez", timeout_s=2.0)
    os.kill(pid_of(run, "fill"), signal.SIGCONT)
    eventually(lambda: probe(f"{urls['fill']}/livez")[0] == 200, 60, "a process that goes on to be alive again")

    running.terminate()
    eventually(lambda: probe(f"{urls['supervisor']}/readyz") == (503, "draining\n"), 60, "the run to drain")
    eventually(lambda: probe(f"{urls['label-0']}/readyz") == (503, "draining\n"), 60, "the labeler to drain")
    (run.directory / "labels").touch()
    assert running.wait(300) == 0, run.log_of(running)
    book = book_of(run)
    assert book["balanced"]
    unlabelled = book["unlabelled"]
    assert isinstance(unlabelled, dict)
    assert unlabelled["labeled"] > 0


def pid_of(run: RealRun, name: str) -> int:
    """Process id of a role of the run that was started last."""
    lines = [json.loads(line) for line in run.log_of(run.processes[-1]).splitlines() if line.startswith("{")]
    started = [line for line in lines if (line["event"], line.get("role")) == ("role_started", name)]
    return int(started[-1]["pid"])
