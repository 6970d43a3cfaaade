"""Processes are identified across reused pids; a kept child ends with the process that started it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import rollstream.infra.broker.child_keeper
from rollstream.infra.broker import broker_start
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.broker_state import BrokerState
from rollstream.infra.broker.process_identity import ProcessIdentity, await_end, identify, is_running, kill_group, send
from rollstream.infra.config import BrokerConfig
from rollstream.topics.errors import BrokerUnavailable
from tests.support.waiting import eventually

SLEEPER = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


def test_a_process_is_itself_until_it_ended() -> None:
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as child:
        process = identify(child.pid)
        assert process is not None
        assert identify(child.pid) == process
        assert not await_end(process, 0.05)
        assert send(process, signal.SIGKILL)
        # Until its parent collects it, the process is a zombie, which counts as ended.
        assert await_end(process, 60)
        assert identify(child.pid) is None
    assert not send(process, signal.SIGTERM)


def test_another_process_with_the_same_number_is_not_signalled() -> None:
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, start_new_session=True) as child:
        earlier = ProcessIdentity(child.pid, "started long ago")
        assert not is_running(earlier)
        assert not send(earlier, signal.SIGKILL)
        kill_group(earlier)
        assert child.poll() is None
        child.kill()


def test_two_processes_are_two_identities() -> None:
    assert identify(os.getpid()) != identify(os.getppid())


def test_an_identity_is_the_same_in_every_time_zone_and_language(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As on macOS, which has no /proc.
    monkeypatch.setattr("rollstream.infra.broker.process_identity.PROC", tmp_path)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    in_berlin = identify(os.getpid())
    monkeypatch.setenv("TZ", "America/New_York")
    assert in_berlin is not None
    assert identify(os.getpid()) == in_berlin


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def keeper_task(
    tmp_path: Path, command: list[str], stop_timeout_s: float = 10.0, kill_command: Sequence[str] = ()
) -> str:
    task = {"command": command, "kill_command": kill_command, "log": str(tmp_path / "log"), "cwd": str(tmp_path)}
    return json.dumps({**task, "stop_timeout_s": stop_timeout_s})


def kept_child_of_a_killed_asker(
    tmp_path: Path, command: list[str], stop_timeout_s: float, kill_command: Sequence[str] = (), output: str = ""
) -> ProcessIdentity:
    """The child of a keeper whose asker was killed with SIGKILL once the child had written `output`."""
    asking = (
        "import subprocess, sys\n"
        "keeper = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(keeper.stdout.readline().decode(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    task = keeper_task(tmp_path, command, stop_timeout_s, kill_command)
    keeper = [sys.executable, rollstream.infra.broker.child_keeper.__file__, task]
    with subprocess.Popen(
        [sys.executable, "-c", asking, *keeper], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as asker:
        assert asker.stdout is not None
        child = identify(int(asker.stdout.readline()))
        assert child is not None
        eventually(lambda: output in (tmp_path / "log").read_text(), 60, "the child is at work")
        asker.kill()
    return child


def test_a_kept_child_ends_when_its_asker_is_killed(tmp_path: Path) -> None:
    child = kept_child_of_a_killed_asker(tmp_path, ["sleep", "600"], 10.0)
    eventually(lambda: not is_running(child), 60, "the kept child ended")


def test_a_kept_child_that_ignores_sigterm_is_killed_after_its_deadline(tmp_path: Path) -> None:
    child = kept_child_of_a_killed_asker(tmp_path, [sys.executable, "-c", DEAF], 0.3, output="deaf")
    eventually(lambda: not is_running(child), 60, "the deaf child ended")


def test_a_kept_child_is_killed_although_the_command_that_kills_it_fails(tmp_path: Path) -> None:
    missing = [str(tmp_path / "missing")]
    child = kept_child_of_a_killed_asker(tmp_path, [sys.executable, "-c", DEAF], 0.3, missing, output="deaf")
    eventually(lambda: not is_running(child), 60, "the deaf child ended")


@pytest.mark.parametrize("kill_command", [("sleep", "600"), ("/missing/docker", "kill", "broker")])
def test_a_broker_whose_kill_command_hangs_or_fails_is_reported(
    kill_command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_start, "KILL_TIMEOUT_S", 0.05)
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as child:
        process = identify(child.pid)
        assert process is not None
        state = BrokerState(process, "127.0.0.1", 1, "docker", "log", kill_command)
        broker = LocalBroker(BrokerConfig(data_dir=tmp_path, stop_timeout_s=0.05), state, None)
        with pytest.raises(BrokerUnavailable, match=f"broker pid {child.pid} does not end"):
            broker.kill()
        child.kill()


def test_a_keeper_ends_with_the_status_of_its_child(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('last words'); raise SystemExit(7)"]
    with subprocess.Popen(
        [sys.executable, rollstream.infra.broker.child_keeper.__file__, keeper_task(tmp_path, command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as keeper:
        assert keeper.wait(300) == 7
    assert (tmp_path / "log").read_text() == "last words\n"
