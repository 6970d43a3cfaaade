"""Roles are started, watched and stopped, and none of them outlives the supervisor, however it ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.process.role_process import READY_VARIABLE, announce_progress
from rollstream.pipeline.run.supervised_role import LOG_BYTES, RoleSpec
from rollstream.pipeline.run.supervisor import RoleFailed, Supervisor
from rollstream.topics.errors import DeadlineExceeded, Fenced
from rollstream.topics.logs import JsonFormatter
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.metrics.values import VALUES
from tests.support.interrupting import LIMIT_S, FairTime
from tests.support.paths import PYTHON_PATH
from tests.support.waiting import eventually

PRELUDE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from rollstream.pipeline.process.role_process import announce_progress, announce_ready, stop_on_signals, watch_lifeline
import rollstream.pipeline.process.role_process
rollstream.pipeline.process.role_process.ORPHAN_GRACE_S = 0.3
watch_lifeline()
"""
OBEDIENT = PRELUDE + "stop = stop_on_signals(); announce_ready(); stop.wait()"
STUBBORN = PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); announce_ready(); time.sleep(600)"
SERVING = PRELUDE + (
    "from rollstream.pipeline.process.role_process import inherited_listener\n"
    "listener = inherited_listener(); announce_ready()\n"
    "while True: listener.accept()[0].sendall(str(os.getpid()).encode())"
)
WITH_A_CHILD = PRELUDE + (
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "Path('child').write_text(str(child.pid)); stop = stop_on_signals(); announce_ready(); stop.wait()"
)


def role(name: str, script: str, **settings: object) -> RoleSpec:
    return RoleSpec(name=name, arguments=("-c", script), **settings)  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.chdir(tmp_path)
    return Supervisor(tmp_path / "logs", environment=os.environ)


def poll_until(supervisor: Supervisor, check: Callable[[], bool], what: str) -> None:
    def step() -> bool:
        supervisor.poll(0.01)
        return check()

    eventually(step, 60, what)


def await_finished(supervisor: Supervisor, name: str) -> None:
    """Watch over the roles until this role has finished by itself."""
    deadline = time.monotonic() + 60
    while not supervisor.finished(name):
        assert time.monotonic() < deadline, f"{name} has not finished"
        supervisor.poll(0.1)


def test_roles_become_ready_and_stop_when_told(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT), role("a-1", OBEDIENT))
        supervisor.wait_ready(["a-0", "a-1"])
        pids = list(supervisor.pids.values())
        assert len(pids) == 2
        supervisor.stop(["a-0"])
        assert list(supervisor.pids) == ["a-1"]
    assert all(map(gone, pids))


def test_a_role_has_its_own_session_and_log(supervisor: Supervisor, tmp_path: Path) -> None:
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT.replace("stop.wait()", "print('working', file=sys.stderr); stop.wait()")))
        supervisor.wait_ready(["a-0"])
        assert os.getsid(supervisor.pids["a-0"]) == supervisor.pids["a-0"]
        eventually(lambda: "working" in (tmp_path / "logs" / "a-0.log").read_text(), 60, "the log")


def test_a_role_that_dies_is_started_again_until_it_died_too_often(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT, restarts=2, backoff_s=0.01))
        for _ in range(2):
            supervisor.wait_ready(["a-0"])
            dead = supervisor.pids["a-0"]
            os.kill(dead, signal.SIGKILL)
            poll_until(supervisor, lambda dead=dead: supervisor.pids.get("a-0", dead) != dead, "a restart")  # type: ignore[misc]
        supervisor.wait_ready(["a-0"])
        os.kill(supervisor.pids["a-0"], signal.SIGKILL)
        with pytest.raises(RoleFailed, match=r"a-0 exited with signal SIGKILL, which .* memory runs out \(3 times\)"):
            await_finished(supervisor, "a-0")


def test_an_optional_role_that_fails_is_given_up_and_the_others_go_on(supervisor: Supervisor) -> None:
    failing = role("page", "import sys; sys.exit('rollstream: no port is free')", optional=True, restarts=1)
    mute = role("mute", "import time; time.sleep(600)", optional=True, ready_timeout_s=0.5)
    with supervisor:
        supervisor.start(failing, mute, role("group-0", OBEDIENT))
        supervisor.wait_ready(["group-0"])
        poll_until(supervisor, lambda: bool(supervisor.failure("page") and supervisor.failure("mute")), "both failures")
        assert "no port is free" in supervisor.failure("page")
        assert "not ready within 0.5 s" in supervisor.failure("mute")
        assert not supervisor.is_ready("page")
        assert list(supervisor.pids) == ["group-0"]
        supervisor.poll(0.01)
        assert supervisor.failure("group-0") == ""


def test_a_role_whose_work_another_does_is_started_again_every_minute_and_the_others_go_on(
    supervisor: Supervisor,
) -> None:
    with supervisor:
        often = "sys.stderr.write('rollstream: no room on the disk\\n'); sys.exit(2)"
        crashing = PRELUDE + f"announce_ready(); time.sleep(0.2); {often}"
        supervisor.start(
            role("a-0", OBEDIENT, shares_work=True),
            role("a-1", crashing, restarts=1, backoff_s=0.01, shares_work=True),
        )
        supervisor.wait_ready(["a-0", "a-1"])
        poll_until(supervisor, lambda: bool(supervisor.crash_loops), "a crash loop")
        (loop,) = supervisor.crash_loops.values()
        assert (loop.exits, loop.again_in_s) == (2, 60.0)
        assert "exited with code 2 (2 times): no room on the disk" in loop.cause
        assert list(supervisor.pids) == ["a-0"]


def test_clients_of_a_role_wait_while_it_is_started_again_and_are_refused_when_it_is_retired(
    supervisor: Supervisor,
) -> None:
    address = ("127.0.0.1", free_port("127.0.0.1"))
    with supervisor:
        supervisor.start(role("a-0", SERVING, backoff_s=0.01, address=address))
        supervisor.wait_ready(["a-0"])
        killed = supervisor.kill("a-0")
        with socket.create_connection(address, 60) as client:
            poll_until(supervisor, lambda: supervisor.is_ready("a-0"), "a restart")
            assert int(client.recv(100)) == supervisor.pids["a-0"] != killed
        supervisor.retire("a-0")
        poll_until(supervisor, lambda: not supervisor.holds("a-0"), "its end")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 60)


def test_clients_of_a_role_that_is_not_started_again_soon_are_refused(supervisor: Supervisor) -> None:
    address = ("127.0.0.1", free_port("127.0.0.1"))
    with supervisor:
        supervisor.start(role("a-0", SERVING, restarts=0, expendable=True, address=address))
        supervisor.wait_ready(["a-0"])
        supervisor.kill("a-0")
        poll_until(supervisor, lambda: bool(supervisor.crash_loops), "a crash loop")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 60)


def test_a_role_that_another_process_fenced_is_not_started_again(supervisor: Supervisor) -> None:
    fenced = PRELUDE + "announce_ready(); time.sleep(0.2); os._exit(3)"
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT, shares_work=True), role("a-1", fenced, backoff_s=0.01, shares_work=True))
        supervisor.wait_ready(["a-0", "a-1"])
        poll_until(supervisor, lambda: bool(supervisor.failure("a-1")), "the end of a role whose work another does")
        supervisor.poll(0.1)
        assert list(supervisor.pids) == ["a-0"]
        assert supervisor.crash_loops["a-1"].is_final
        supervisor.start(role("b-0", fenced, backoff_s=0.01))
        with pytest.raises(Fenced, match=r"role b-0 gave way to another process in its place: .*end that process"):
            await_finished(supervisor, "b-0")


def test_a_supervisor_that_must_end_ends_with_its_roles(tmp_path: Path) -> None:
    taken: list[Fenced] = []

    def check() -> None:
        for error in taken:
            raise error

    def supervise() -> None:
        with Supervisor(
            tmp_path / "logs", environment={**os.environ, "PYTHONPATH": PYTHON_PATH}, check=check
        ) as ending:
            ending.start(role("a-0", OBEDIENT))
            ending.wait_ready(["a-0"])
            pids.extend(ending.pids.values())
            taken.append(Fenced("taken over"))
            ending.poll()

    pids: list[int] = []
    with pytest.raises(Fenced, match="taken over"):
        supervise()
    assert len(pids) == 1
    assert all(map(gone, pids))


def test_a_role_that_was_added_and_never_becomes_ready_ends_nothing(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT))
        supervisor.wait_ready(["a-0"])
        supervisor.start(
            role("b-0", "import sys; sys.exit(2)", expendable=True),
            role("c-0", "import time; time.sleep(600)", expendable=True, ready_timeout_s=0.5),
        )
        poll_until(supervisor, lambda: set(supervisor.crash_loops) == {"b-0", "c-0"}, "both given up for now")
        assert list(supervisor.pids) == ["a-0"]
        supervisor.retire("b-0")
        poll_until(supervisor, lambda: set(supervisor.crash_loops) == {"c-0"}, "one taken away")


def test_an_exit_is_forgotten_after_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    time_s = 0.0
    with Supervisor(tmp_path / "logs", environment=os.environ, clock=lambda: time_s) as supervisor:
        supervisor.start(role("a-0", OBEDIENT, restarts=1, backoff_s=0.0, window_s=100.0))
        supervisor.wait_ready(["a-0"])
        for _ in range(3):
            before = supervisor.pids["a-0"]
            assert supervisor.kill("a-0") == before
            poll_until(supervisor, lambda: supervisor.is_ready("a-0"), "a restart")
            time_s += 101.0
        supervisor.kill("a-0")
        poll_until(supervisor, lambda: supervisor.is_ready("a-0"), "a restart")
        supervisor.kill("a-0")
        with pytest.raises(RoleFailed, match=r"\(2 times\)"):
            await_finished(supervisor, "a-0")


def test_a_role_that_was_killed_is_not_ready_until_it_says_so_again(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(
            role("a-0", OBEDIENT, backoff_s=0.01), role("b-0", PRELUDE + "announce_ready()", finishes=True)
        )
        supervisor.wait_ready(["a-0"])
        before = supervisor.pids["a-0"]
        assert supervisor.kill("a-0") == before
        assert gone(before)
        assert not supervisor.is_ready("a-0")
        poll_until(supervisor, lambda: supervisor.is_ready("a-0"), "a restart")
        assert supervisor.pids["a-0"] != before
        await_finished(supervisor, "b-0")
        assert supervisor.kill("b-0") is None


def test_roles_that_are_retired_end_while_others_are_watched_and_may_come_back(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT), role("a-1", OBEDIENT), role("a-2", STUBBORN, stop_timeout_s=0.5))
        supervisor.wait_ready(["a-0", "a-1", "a-2"])
        before = dict(supervisor.pids)
        supervisor.retire("a-1", "a-2")
        poll_until(supervisor, lambda: list(supervisor.pids) == ["a-0"], "the end of both")
        assert gone(before["a-1"])
        assert gone(before["a-2"])
        supervisor.start(role("a-1", OBEDIENT))
        supervisor.wait_ready(["a-1"])
        # Its end has left no trace: the role is restarted like any other, and stops with the others of its kind.
        os.kill(supervisor.pids["a-1"], signal.SIGKILL)
        poll_until(supervisor, lambda: supervisor.pids.get("a-1", 0) not in (0, before["a-1"]), "a restart")


def test_the_count_of_restarts_does_not_fall_when_a_restarted_role_is_retired(supervisor: Supervisor) -> None:
    [spec] = [spec for spec in CATALOGUE_OF_METRICS if spec.name == "rollstream_supervisor_restarts_total"]
    with supervisor:
        names = ["a-0", "a-1"]
        supervisor.start(*(role(name, OBEDIENT, backoff_s=0.01) for name in names))
        supervisor.wait_ready(names)
        for name in names:
            dead = supervisor.kill(name)
            poll_until(supervisor, lambda dead=dead, name=name: supervisor.pids[name] != dead, "a restart")  # type: ignore[misc]
        supervisor.retire("a-1")
        poll_until(supervisor, lambda: not supervisor.holds("a-1"), "the end of the role")
        supervisor.poll()
        assert VALUES.values_of(spec) == {(): 2}


def test_roles_of_a_kind_stop_together_when_some_were_added_later(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rollstream")
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT))
        supervisor.start(role("b-0", OBEDIENT))
        supervisor.start(role("a-1", OBEDIENT))
        supervisor.wait_ready(["a-0", "b-0", "a-1"])
    events = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [event["role"] for event in events if event["event"] == "role_stopped"] == ["b-0", "a-0", "a-1"]


def test_a_role_that_fails_before_it_was_ready_fails_the_run_with_its_log(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", PRELUDE + "sys.exit('no such thing')"))
        with pytest.raises(RoleFailed, match=r"a-0 exited with code 1(.|\n)*no such thing"):
            supervisor.wait_ready(["a-0"])


def test_the_end_of_a_log_of_any_length_names_the_cause(supervisor: Supervisor, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a-0.log"
    script = f"os.truncate({str(log)!r}, 512 * 2**20); print(flush=True); sys.exit('rollstream: no room on the disk')"
    tracemalloc.start()
    try:
        with supervisor:
            supervisor.start(role("a-0", PRELUDE + script))
            with pytest.raises(RoleFailed, match=r"a-0 exited with code 1: no room on the disk \("):
                supervisor.wait_ready(["a-0"])
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("size", "aside"), [(LOG_BYTES, False), (LOG_BYTES + 1, True)])
def test_a_long_log_is_put_aside_when_its_role_is_started_again(
    supervisor: Supervisor, tmp_path: Path, size: int, aside: bool
) -> None:
    log, earlier = tmp_path / "logs" / "a-0.log", tmp_path / "logs" / "a-0.log.1"
    log.touch()
    os.truncate(log, size)
    earlier.write_text("put aside before")
    with supervisor:
        supervisor.start(role("a-0", PRELUDE + "print('begun', flush=True); announce_ready(); time.sleep(600)"))
        supervisor.wait_ready(["a-0"])
    assert earlier.stat().st_size == (size if aside else len("put aside before"))
    with log.open("rb") as file:
        file.seek(0 if aside else size)
        assert file.read() == b"begun\n"


def test_a_role_that_is_never_ready_fails_the_run(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", PRELUDE + "time.sleep(600)", ready_timeout_s=0.3))
        with pytest.raises(DeadlineExceeded, match=r"a-0 was not ready within 0\.3 s"):
            supervisor.wait_ready(["a-0"])


class Hours:
    """A clock that moves only when a test moves it, so that real waits may take any time."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


UPDATES = """
for n in range(4):
    announce_progress(f"update {n} of 4")
    while not Path(f"heard update {n} of 4").exists():
        time.sleep(0.01)
announce_ready()
"""


@pytest.mark.usefixtures("supervisor")
def test_a_role_that_reports_progress_may_take_longer() -> None:
    clock, heard = Hours(), []

    def hear(name: str, progress: str) -> None:
        heard.append((name, progress))
        clock.now_s += 50  # of the 60 s allowed between two updates
        Path(f"heard {progress}").touch()

    with Supervisor(Path("logs"), on_progress=hear, clock=clock) as supervisor:
        supervisor.start(role("a-0", PRELUDE + UPDATES, ready_timeout_s=60, finishes=True))
        supervisor.wait_ready(["a-0"])
    assert heard == [("a-0", f"update {n} of 4") for n in range(4)]


@pytest.mark.usefixtures("supervisor")
def test_a_role_that_stops_reporting_fails_the_run_with_its_last_progress() -> None:
    clock = Hours()

    def hear(_name: str, progress: str) -> None:
        if progress == "update 2 of 4":
            clock.now_s += 61
        else:
            Path(f"heard {progress}").touch()

    with Supervisor(Path("logs"), on_progress=hear, clock=clock) as supervisor:
        supervisor.start(role("a-0", PRELUDE + UPDATES, ready_timeout_s=60))
        with pytest.raises(
            DeadlineExceeded, match="not ready within 60 s after its last progress report: update 2 of 4"
        ):
            supervisor.wait_ready(["a-0"])


def test_unread_progress_blocks_no_role(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        for _ in range(3000):
            assert announce_progress("x" * 50, {READY_VARIABLE: str(write)})
    finally:
        os.close(read)
        os.close(write)
    assert not announce_progress("x", {})


def test_a_role_that_finishes_is_not_started_again(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", PRELUDE + "announce_ready()", finishes=True))
        await_finished(supervisor, "a-0")
        assert not supervisor.pids


def test_a_role_that_may_end_is_started_again_only_when_that_is_withdrawn(tmp_path: Path) -> None:
    drained = {"a"}
    starts = tmp_path / "starts"
    script = f"{PRELUDE}announce_ready(); Path({str(starts)!r}).open('a').write('x')"
    where = os.environ | {"PYTHONPATH": PYTHON_PATH}
    with Supervisor(tmp_path / "logs", environment=where, may_end=drained.__contains__) as supervisor:
        supervisor.start(role("a-0", script, restarts=0))
        poll_until(supervisor, lambda: not supervisor.pids, "its end")
        supervisor.poll(0.1)
        assert (starts.read_text(), supervisor.pids, supervisor.finished("a-0")) == ("x", {}, False)
        drained.clear()
        poll_until(supervisor, lambda: starts.read_text() == "xx", "its second start")


def test_a_role_that_ignores_sigterm_is_killed_after_its_deadline(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", STUBBORN, stop_timeout_s=0.2))
        supervisor.wait_ready(["a-0"])
        pid = supervisor.pids["a-0"]
    assert gone(pid)


def test_processes_that_a_role_started_end_with_it(supervisor: Supervisor, tmp_path: Path) -> None:
    with supervisor:
        supervisor.start(role("a-0", WITH_A_CHILD))
        supervisor.wait_ready(["a-0"])
        child = int((tmp_path / "child").read_text())
        assert not gone(child)
    eventually(lambda: gone(child), 60, "the end of the role's own child")


def test_roles_stop_in_reverse_order_and_by_kind(supervisor: Supervisor, tmp_path: Path) -> None:
    noting = OBEDIENT + "; open('order', 'a').write(sys.argv[1] + ' ')"
    with supervisor:
        for name in ("one-0", "two-0", "two-1"):
            supervisor.start(RoleSpec(name=name, arguments=("-c", noting, name)))
            supervisor.wait_ready([name])
    order = (tmp_path / "order").read_text().split()
    assert set(order[:2]) == {"two-0", "two-1"}
    assert order[2] == "one-0"


SUPERVISING = """
import sys, time
from pathlib import Path
from rollstream.pipeline.process.role_process import Interrupts
from rollstream.pipeline.process.role_process import READY_VARIABLE, announce_progress
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.pipeline.run.supervisor import Supervisor
interrupts = Interrupts()
interrupts.install()
with Supervisor(Path("logs"), interrupts=interrupts) as supervisor:
    interrupts.kill_now = supervisor.kill_now
    for n, script in enumerate(sys.argv[1:]):
        supervisor.start(RoleSpec(name=f"a-{n}", arguments=("-c", script), stop_timeout_s=30, restarts=0))
    supervisor.wait_ready(f"a-{n}" for n in range(len(sys.argv) - 1))
    try:
        print(*supervisor.pids.values(), flush=True)  # inside: a test may interrupt as soon as it has read this
        while True:
            supervisor.poll(0.05)
    finally:
        print("stopping", file=sys.stderr, flush=True)
"""


def supervise(*scripts: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISING, *scripts], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert pids, process.communicate(timeout=300)
    return process, pids


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=300)
    return process.returncode


@pytest.mark.usefixtures("supervisor")
def test_no_role_survives_the_kill_of_its_supervisor() -> None:
    process, pids = supervise(OBEDIENT, STUBBORN)
    assert len(pids) == 2
    process.kill()
    finish(process)
    eventually(lambda: all(map(gone, pids)), 60, "the end of the orphans")


@pytest.mark.usefixtures("supervisor")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_in_order(number: signal.Signals) -> None:
    process, pids = supervise(OBEDIENT, OBEDIENT)
    process.send_signal(number)
    assert finish(process) != 0
    assert all(map(gone, pids))


@pytest.mark.usefixtures("supervisor")
def test_ctrl_c_leaves_a_stubborn_role_little_time() -> None:
    process, pids = supervise(STUBBORN)  # SIGTERM would leave it 30 s
    with FairTime() as passed:
        process.send_signal(signal.SIGINT)
        assert finish(process) != 0
    assert passed.seconds < LIMIT_S
    assert all(map(gone, pids))


@pytest.mark.usefixtures("supervisor")
def test_an_interrupt_after_another_signal_kills_at_once() -> None:
    process, pids = supervise(STUBBORN, STUBBORN)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == 130
    assert all(map(gone, pids))


DRAINING = PRELUDE + (
    "stop = stop_on_signals(); announce_ready(); stop.wait(); Path('told').touch()\n"
    "while not Path('go').exists():\n"
    "    time.sleep(0.01)\n"
    "Path('drained').touch()"
)
FAILING = PRELUDE + "announce_ready()\nwhile not Path('fail').exists():\n    time.sleep(0.01)\nsys.exit('no room')"


@pytest.mark.usefixtures("supervisor")
def test_a_signal_during_the_stop_of_a_failed_run_keeps_its_error_and_its_roles_drain() -> None:
    process, pids = supervise(DRAINING, FAILING)
    Path("fail").touch()
    eventually(Path("told").exists, 60, "the stop of the other role")
    process.send_signal(signal.SIGTERM)
    Path("go").touch()
    _output, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "RoleFailed: role a-1 exited with code 1" in errors
    assert "Interrupted" not in errors
    assert Path("drained").exists()
    assert all(map(gone, pids))


@pytest.mark.usefixtures("supervisor")
def test_ctrl_c_during_the_stop_of_a_failed_run_cuts_the_stop_short_and_keeps_the_error() -> None:
    process, pids = supervise(DRAINING, FAILING)
    Path("fail").touch()
    eventually(Path("told").exists, 60, "the stop of the other role, which would take 30 s")
    with FairTime() as passed:
        process.send_signal(signal.SIGINT)
        _output, errors = process.communicate(timeout=300)
    assert passed.seconds < LIMIT_S
    assert "RoleFailed: role a-1 exited with code 1" in errors
    assert all(map(gone, pids))


@pytest.mark.parametrize(("handler", "code"), [("SIG_DFL", 1), ("SIG_IGN", 0)])
def test_a_hangup_interrupts_unless_it_was_ignored_as_nohup_does(handler: str, code: int) -> None:
    script = f"""
import os, signal
from rollstream.pipeline.process.role_process import Interrupted, Interrupts
signal.signal(signal.SIGHUP, signal.{handler})
Interrupts().install()
try:
    os.kill(os.getpid(), signal.SIGHUP)
except Interrupted:
    raise SystemExit(1)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=300).returncode == code


def test_a_log_that_was_deleted_is_named_and_ends_nothing(supervisor: Supervisor) -> None:
    deletes = "import os, sys; os.remove('logs/page.log'); sys.exit(4)"
    with supervisor:
        supervisor.start(role("page", deletes, optional=True, restarts=0), role("group-0", OBEDIENT))
        supervisor.wait_ready(["group-0"])
        poll_until(supervisor, lambda: bool(supervisor.failure("page")), "the failure")
        assert "its log cannot be read" in supervisor.failure("page")


def test_logs_that_were_deleted_keep_no_role_from_starting_again(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT, restarts=1, backoff_s=0.01))
        supervisor.wait_ready(["a-0"])
        shutil.rmtree("logs")
        before = supervisor.kill("a-0")
        poll_until(supervisor, lambda: supervisor.is_ready("a-0"), "a restart")
        assert supervisor.pids["a-0"] != before
        assert Path("logs/a-0.log").exists()


def test_a_role_that_cannot_be_started_again_is_tried_later_and_the_others_go_on(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(
            role("a-0", OBEDIENT, shares_work=True), role("a-1", OBEDIENT, restarts=2, backoff_s=0.01, shares_work=True)
        )
        supervisor.wait_ready(["a-0", "a-1"])
        shutil.rmtree("logs")
        Path("logs").write_text("no folder")
        supervisor.kill("a-1")
        poll_until(supervisor, lambda: bool(supervisor.crash_loops), "three failures")
        [loop] = supervisor.crash_loops.values()
        assert (loop.exits, loop.again_in_s) == (3, 60.0)
        assert loop.cause.startswith("could not be started (3 times): [Errno 17] File exists")
        assert list(supervisor.pids) == ["a-0"]


def test_a_role_that_is_alone_and_cannot_be_started_again_fails_the_run_with_the_cause(supervisor: Supervisor) -> None:
    with supervisor:
        supervisor.start(role("a-0", OBEDIENT, restarts=1, backoff_s=0.01))
        supervisor.wait_ready(["a-0"])
        shutil.rmtree("logs")
        Path("logs").write_text("no folder")
        supervisor.kill("a-0")
        with pytest.raises(RoleFailed, match=r"role a-0 could not be started \(2 times\): .*/logs.*; check"):
            await_finished(supervisor, "a-0")


def test_a_role_that_was_added_and_cannot_be_started_ends_nothing(tmp_path: Path) -> None:
    hours = Hours()
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    with Supervisor(tmp_path / "logs", environment=environment, clock=hours) as supervisor:
        supervisor.start(role("a-0", OBEDIENT))
        supervisor.wait_ready(["a-0"])
        in_place_of_a_log = tmp_path / "logs" / "b-0.log"
        in_place_of_a_log.mkdir()
        supervisor.start(role("b-0", OBEDIENT, expendable=True), role("b-1", OBEDIENT, expendable=True))
        assert supervisor.crash_loops["b-0"].cause.startswith("could not be started: ")
        assert supervisor.holds("b-0")
        supervisor.wait_ready(["b-1"])
        assert set(supervisor.pids) == {"a-0", "b-1"}
        in_place_of_a_log.rmdir()
        hours.now_s += 61
        supervisor.wait_ready(["b-0"])
        in_place_of_a_log.with_name("b-2.log").mkdir()
        supervisor.start(role("b-2", OBEDIENT, expendable=True))
        supervisor.retire("b-2")
        supervisor.poll()
        assert not supervisor.holds("b-2")
    assert not supervisor.pids
