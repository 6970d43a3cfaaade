"""The next supervisor adopts the processes of a killed one if it would start the same processes; otherwise they end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollstream.pipeline.process.orphans import read
from rollstream.pipeline.run.process_registry import ProcessRegistry
from rollstream.pipeline.run.supervised_role import NO_EXIT_CODE, RoleSpec
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import lock_directory, write_json
from tests.support.paths import ROOT
from tests.support.waiting import eventually
from tests.unit.pipeline.run.test_supervisor import poll_until

ROLE = """
import sys, time
from pathlib import Path
import rollstream.pipeline.process.role_process as role_process
from rollstream.pipeline.process.orphans import leave_exit_code
role_process.ORPHAN_GRACE_S = 0.3
role_process.watch_lifeline()
stop = role_process.stop_on_signals()
role_process.announce_ready()
while not stop.wait(0.02) and not Path("finish").exists():
    pass
leave_exit_code(0)
"""
WITH_A_CHILD = (
    "import subprocess, sys\n"
    "from pathlib import Path\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "Path(f'child-{child.pid}').touch()\n"
) + ROLE
STUBBORN = WITH_A_CHILD.replace(
    "role_process.announce_ready()",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrole_process.announce_ready()",
)
MUTE = ROLE.replace("role_process.announce_ready()", "")
SUPERVISING = """
import json, sys
from pathlib import Path
from rollstream.pipeline.run.process_registry import ProcessRegistry
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.pipeline.run.supervisor import Supervisor
adoption_s, configuration, roles = json.loads(sys.argv[1])
registry = ProcessRegistry(Path("processes"), configuration, adoption_s=adoption_s)
with Supervisor(Path("logs"), registry=registry) as supervisor:
    supervisor.start(*(RoleSpec(name=name, arguments=("-c", script)) for name, script in roles.items()))
    supervisor.wait_ready(name for name in roles if not name.startswith("mute"))
    print(json.dumps(supervisor.pids), flush=True)
    while True:
        supervisor.poll(0.05)
"""


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    (tmp_path / "finish").touch()


def left(adoption_s: float = 300.0, configuration: str = "c", **roles: str) -> dict[str, int]:
    """Start roles under a supervisor, kill it, and return the processes that it leaves."""
    names = {name.replace("_", "-"): script for name, script in roles.items()}
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISING, json.dumps([adoption_s, configuration, names])],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids: dict[str, int] = json.loads(process.stdout.readline())
        process.kill()
    return pids


def child_of_a_role() -> int:
    [started] = Path().glob("child-*")
    return int(started.name.removeprefix("child-"))


def spec(name: str, script: str = ROLE) -> RoleSpec:
    return RoleSpec(name=name, arguments=("-c", script), backoff_s=0.01)


def registry(configuration: str = "c") -> ProcessRegistry:
    return ProcessRegistry(Path("processes"), configuration)


def test_ready_processes_of_the_same_command_are_adopted_and_stopped_like_others() -> None:
    pids = left(a_0=ROLE, b_0=ROLE)
    with registry() as taken, Supervisor(Path("logs"), registry=taken) as supervisor:
        assert taken.orphans.keys() == pids.keys()
        supervisor.start(spec("a-0"), spec("b-0"))
        supervisor.wait_ready(["a-0", "b-0"])
        taken.end_orphans()
        assert (supervisor.pids, supervisor.adopted) == (pids, ("a-0", "b-0"))
        supervisor.stop(["a-0"])
        assert not runs(pids["a-0"])
        assert runs(pids["b-0"])
    assert not runs(pids["b-0"])
    assert read(taken.path) is None


def test_processes_are_adopted_again_and_again() -> None:
    pids = left(a_0=ROLE)
    assert left(a_0=ROLE) == pids
    assert left(a_0=ROLE) == pids


def test_an_adopted_process_that_dies_is_started_again_by_its_new_supervisor() -> None:
    pids = left(a_0=ROLE)
    with registry() as taken, Supervisor(Path("logs"), registry=taken) as supervisor:
        supervisor.start(spec("a-0"))
        os.kill(pids["a-0"], signal.SIGKILL)
        poll_until(supervisor, lambda: supervisor.pids.get("a-0", pids["a-0"]) != pids["a-0"], "a restart")
        supervisor.wait_ready(["a-0"])
        assert supervisor.adopted == ()


def test_what_an_adopted_process_started_ends_with_it_when_it_is_killed() -> None:
    pids = left(a_0=WITH_A_CHILD)
    child = child_of_a_role()
    with registry() as taken, Supervisor(Path("logs"), registry=taken) as supervisor:
        supervisor.start(spec("a-0", WITH_A_CHILD))
        assert runs(child)
        os.kill(pids["a-0"], signal.SIGKILL)
        poll_until(supervisor, lambda: not runs(child), "the end of its child")


@pytest.mark.parametrize(("by_itself", "code"), [(True, 0), (False, NO_EXIT_CODE)])
def test_the_exit_code_of_an_adopted_process_is_known_if_it_left_one(by_itself: bool, code: int) -> None:
    pids = left(a_0=ROLE)
    with registry() as taken:
        process = taken.adopt("a-0", spec("a-0").command_digest)
        assert process is not None
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        if by_itself:
            Path("finish").touch()
        else:
            os.kill(pids["a-0"], signal.SIGKILL)
        assert (process.wait(60), process.poll()) == (code, code)


def test_an_exit_code_that_was_left_for_nobody_is_no_other_process_s() -> None:
    pids = left(a_0=ROLE)
    Path(f"processes/exit-{pids['a-0']}").write_text("0")  # by an earlier process with the same id
    with registry() as taken:
        process = taken.adopt("a-0", spec("a-0").command_digest)
        assert process is not None
        process.kill()
        assert process.wait(60) == NO_EXIT_CODE


def test_a_process_of_another_command_is_ended_before_its_name_is_started() -> None:
    pids = left(a_0=ROLE)
    with registry() as taken, Supervisor(Path("logs"), registry=taken) as supervisor:
        supervisor.start(spec("a-0", ROLE + "\n# another"))
        assert not runs(pids["a-0"])
        supervisor.wait_ready(["a-0"])
        assert supervisor.adopted == ()


def test_a_supervisor_that_adopts_nothing_leaves_nothing() -> None:
    pids = left(a_0=ROLE)
    registry().close()
    assert not runs(pids["a-0"])


def test_processes_that_nobody_starts_any_more_are_ended() -> None:
    pids = left(a_0=ROLE, a_1=ROLE)
    with registry() as taken, Supervisor(Path("logs"), registry=taken) as supervisor:
        supervisor.start(spec("a-0"))
        assert runs(pids["a-1"])
        taken.end_orphans()
        assert (runs(pids["a-0"]), runs(pids["a-1"])) == (True, False)


def test_processes_that_follow_another_configuration_are_ended_at_once() -> None:
    pids = left(configuration="before", a_0=ROLE)
    with registry() as taken:
        assert (taken.orphans, runs(pids["a-0"])) == ({}, False)


def test_a_process_that_was_not_ready_is_ended() -> None:
    pids = left(mute_0=MUTE)
    with registry() as taken:
        assert (taken.orphans, runs(pids["mute-0"])) == ({}, False)


def test_a_process_that_the_list_does_not_name_ends_by_itself() -> None:
    pids = left(a_0=ROLE, a_1=ROLE)
    path = Path("processes/processes.json")
    listed = json.loads(path.read_text())
    del listed["processes"]["a-1"]  # as if the supervisor had been killed before it listed the process
    write_json(path, listed)
    with registry() as taken:
        assert taken.orphans.keys() == {"a-0"}
        eventually(lambda: not runs(pids["a-1"]), 60, "its end")
        assert runs(pids["a-0"])


def test_processes_that_nobody_adopts_end_in_time() -> None:
    pids = left(adoption_s=0.2, a_0=ROLE)
    eventually(lambda: not runs(pids["a-0"]), 60, "its end")


@pytest.mark.parametrize("script", [WITH_A_CHILD, STUBBORN])
def test_what_a_process_started_ends_with_it_when_nobody_adopts_it(script: str) -> None:
    pids = left(adoption_s=0.2, a_0=script)
    child = child_of_a_role()
    eventually(lambda: not runs(child), 60, "the end of its child")
    eventually(lambda: not runs(pids["a-0"]), 60, "its end")


def test_what_a_process_started_ends_with_it_when_it_is_not_adopted() -> None:
    pids = left(configuration="before", a_0=WITH_A_CHILD)
    child = child_of_a_role()
    with registry():
        assert not runs(pids["a-0"])
        eventually(lambda: not runs(child), 60, "the end of its child")


def test_a_second_supervisor_of_a_run_is_refused_with_the_first_one_named() -> None:
    with registry(), pytest.raises(ConfigurationError, match=rf"process {os.getpid()} already supervises .* first"):
        registry()


def test_a_supervisor_that_does_not_run_on_this_machine_is_not_called_a_buffer() -> None:
    # The other host has the lock of the shared folder, and no process of this machine is on its list.
    with (
        lock_directory(Path("processes"), "lock"),
        pytest.raises(ConfigurationError, match=r"another `rollstream run` supervises .*another host.*; stop it first"),
    ):
        registry()


def test_a_list_that_cannot_be_read_is_begun_anew() -> None:
    Path("processes").mkdir()
    Path("processes/processes.json").write_text('{"supervisor": 7}')
    with registry() as taken:
        assert taken.orphans == {}
        read_back = read(taken.path)
        assert read_back is not None
        assert read_back.supervisor.pid == os.getpid()
