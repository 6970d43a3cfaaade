"""A forked role is to tests what a process is that users start: its parent, group, signals, output and exit code."""

import signal
import subprocess
from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig
from tests.support import role_server
from tests.support.runs import RealRun
from tests.support.waiting import eventually


def working(run: RealRun, *, forked: bool) -> "subprocess.Popen[bytes]":
    process = run.start("group", forked=forked)
    assert isinstance(process, role_server.ForkedRole) == forked
    eventually(lambda: '"event": "assigned"' in run.log_of(process), 60, "the role works")
    return process


def nature(process: "subprocess.Popen[bytes]") -> dict[str, str]:
    """Parent, group, session, directory and signals of a process."""
    place = Path(f"/proc/{process.pid}")
    parent, group, session = (place / "stat").read_text().rpartition(")")[2].split()[1:4]
    status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line)
    signals = {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")}
    return {"parent": parent, "group": group, "session": session, "cwd": str((place / "cwd").readlink()), **signals}


def test_a_forked_role_is_like_a_started_one(real_run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REAL_PROCESSES", raising=False)  # The long form starts all other roles.
    real_run.prepare()
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        natures = []
        for forked in (True, False):
            process = working(real_run, forked=forked)
            # A thread blocks all signals for the moment in which it starts another.
            eventually(lambda process=process: nature(process)["SigBlk"] == "0" * 16, 60, "no signal is blocked")
            natures.append({**nature(process), "SigBlk": "none"})
            process.send_signal(number)
            assert process.wait(60) == code
        assert natures[0] == natures[1]
    monkeypatch.setenv("LANG", "tlh")
    assert not isinstance(real_run.start("group"), role_server.ForkedRole), "Python reads LANG when it starts"


def test_an_error_is_its_exit_code_and_a_variable_forbids_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RealRun(KafkaConfig(bootstrap_servers="127.0.0.1:1"), "forked", tmp_path)
    alone = run.start("group", supervisor__ready_timeout_s=0)
    monkeypatch.setenv("REAL_PROCESSES", "1")
    assert not isinstance(run.start("group"), role_server.ForkedRole)
    assert alone.wait(60) == 2
    assert run.log_of(alone).startswith("rollstream: no Kafka broker answers at 127.0.0.1:1")
    run.stop()
