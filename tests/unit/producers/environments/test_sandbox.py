"""The sandbox: what code returns comes back, and code that attacks what is around it gets nowhere."""

import asyncio
import os
import site
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.environments.sandbox import (
    ISOLATIONS,
    Failure,
    Isolation,
    Limits,
    Outcome,
    Sandbox,
    SandboxFailed,
)
from tests.support.paths import ROOT
from tests.support.waiting import eventually

CLOSED: tuple[Isolation, ...] = ("namespaces", "landlock")
NAME = "def f(name):\n    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)\n    return time.sleep(9999)"


def run(code: str, *calls: list[Any], isolation: Isolation | None = None, **limits: Any) -> Outcome:
    """Run code with the modules that are imported already: where root has its Python, others may not read it."""
    code = f"import ctypes, os, resource, struct, sys, time\n{code}"
    return asyncio.run(Sandbox(Limits(**limits), isolation=isolation).run(code, "f", calls))


def error_of(outcome: Outcome) -> str:
    [value] = outcome.values
    assert isinstance(value, Failure), value
    return value.error


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Each isolation; where the system refuses one, the strongest that it allows in its place."""
    try:
        run("def f(): pass", [], isolation=request.param)
    except SandboxFailed:
        sandbox = Sandbox()
        asyncio.run(sandbox.run(""))
        assert sandbox.isolation is not None
        return sandbox.isolation
    return request.param  # type: ignore[no-any-return]


def test_values_come_back_as_json_and_no_call_sees_what_another_changed(isolation: Isolation) -> None:
    shared = [1]
    code = "def f(a, b=0):\n    a.append(2)\n    print('seen', a)\n    return {'a': a, 'b': (b, 1.5)}"
    outcome = run(code, [shared], [shared, None], isolation=isolation)
    assert outcome.values == ({"a": [1, 2], "b": [0, 1.5]}, {"a": [1, 2], "b": [None, 1.5]})
    assert (outcome.printed, outcome.error) == ("seen [1, 2]\nseen [1, 2]\n", "")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(): return 1/0", "ZeroDivisionError: division by zero"),
        ("def f(): return {1}", "TypeError: Object of type set is not JSON serializable"),
        ("def f(): sys.exit(0)", "SystemExit: 0"),
        ("def f(): return input()", "EOFError: EOF when reading a line"),
        ("def f(", "SyntaxError: '(' was never closed (<code>, line 2)"),
        ("g = 1", "the code defines no function f"),
        ("def f(): os._exit(0)", "it ended early"),
        ("os._exit(0)", "it ended early"),
        ("def f(): os.kill(os.getpid(), 11); ctypes.string_at(0)", "it ended with 11; it may use 2 s and"),
    ],
)
def test_code_that_returns_nothing_fails_with_the_reason(code: str, error: str) -> None:
    assert error_of(run(code, [])).startswith(error)


def test_a_fork_bomb_starts_no_process(isolation: Isolation) -> None:
    bomb = "def f():\n    for _ in range(50):\n        os.fork() or os._exit(0)"
    assert error_of(run(bomb, [], isolation=isolation)).startswith("BlockingIOError")


def test_ten_gigabytes_are_refused(isolation: Isolation) -> None:
    assert error_of(run("def f(): return len(bytearray(10 << 30))", [], isolation=isolation)).startswith("MemoryError")


def test_an_endless_loop_is_ended_and_earlier_values_are_kept(isolation: Isolation) -> None:
    outcome = run("def f(n):\n    while n: pass\n    return 7", [0], [1], [0], isolation=isolation, cpu_s=1)
    assert outcome.values[0] == 7
    assert [value.error[:13] for value in outcome.values[1:]] == ["it ended with"] * 2


def test_code_that_sleeps_is_ended_and_leaves_no_process(isolation: Isolation) -> None:
    name = f"c{os.getpid()}"
    assert error_of(run(NAME, [name], isolation=isolation, wall_s=1.5)) == "it took longer than 1.5 s"
    assert name not in processes()


def processes() -> set[str]:
    names = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.add(path.read_text().strip())
        except OSError:
            continue  # ended meanwhile
    return names


def test_code_does_not_outlive_a_killed_worker() -> None:
    name = f"k{os.getpid()}"
    script = f"import asyncio; from rollstream.producers.environments.sandbox import Sandbox; code = {NAME!r}\n"
    script += f"asyncio.run(Sandbox().run('import ctypes, time\\n' + code, 'f', [[{name!r}]]))"
    worker = subprocess.Popen([sys.executable, "-P", "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        eventually(lambda: name in processes(), 60, "the code runs")
    finally:
        worker.kill()
        worker.wait()
    eventually(lambda: name not in processes(), 60, "the code is gone")


def test_output_without_an_end_is_cut_off() -> None:
    outcome = run("def f():\n    while True: print('x' * 1000)", [], printed_bytes=10_000)
    assert (error_of(outcome), len(outcome.printed)) == ("it wrote more than 10000 bytes", 10_000)
    assert error_of(run("def f(): return 'x' * (2 << 20)", [])) == "it wrote more than 1048576 bytes"


def test_few_files_can_be_open(isolation: Isolation) -> None:
    code = "def f():\n    for _ in range(30): os.dup(0)"
    assert error_of(run(code, [], isolation=isolation)).startswith("OSError: [Errno 24]")


def test_files_together_are_small(isolation: Isolation) -> None:
    code = "def f():\n    for n in range(100):\n        with open(str(n), 'wb') as file: file.write(bytes(1 << 18))"
    refusals = ("OSError: [Errno 28]", "OSError: [Errno 27]", "PermissionError")
    assert error_of(run(code, [], isolation=isolation)).startswith(refusals)


def test_a_file_in_memory_is_small(isolation: Isolation) -> None:
    code = "def f():\n    file = os.memfd_create('m')\n    for _ in range(9): os.write(file, bytes(1 << 20))"
    assert error_of(run(code, [], isolation=isolation)).startswith("OSError: [Errno 27]")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


@pytest.mark.parametrize("isolation", CLOSED, indirect=True)
def test_no_server_can_be_reached(isolation: Isolation, listener: socket.socket) -> None:
    code = """
def f(port):
    libc = ctypes.CDLL(None)
    address = struct.pack("=H", 2) + struct.pack("!H4B8x", port, 127, 0, 0, 1)
    return libc.connect(libc.socket(2, 1, 0), address, 16)
"""
    assert run(code, [listener.getsockname()[1]], isolation=isolation).values == (-1,)
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("isolation", CLOSED, indirect=True)
def test_the_workers_environment_and_files_are_out_of_reach(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    file = tmp_path / "prices"
    file.write_text("kept")
    file.chmod(0o666)
    code = """
def tried(act, *arguments):
    try:
        return act(*arguments) or "done"
    except OSError:
        return "refused"

def f(worker, folder):
    read = lambda path: open(path, "rb").read().decode("latin1")
    return [
        list(os.environ),
        tried(read, f"/proc/{worker}/environ"),
        tried(read, "/etc/passwd"),
        tried(read, folder + "/prices"),
        tried(os.remove, folder + "/prices"),
        tried(open, folder + "/new", "w"),
        tried(open, os.__file__, "a"),
        tried(os.mkdir, "/usr/lib/new"),
        tried(os.kill, worker, 0) if worker != os.getpid() else "refused",
        tried(os.kill, os.getppid(), 15) if os.getppid() else "refused",
    ]
"""
    [[variables, *attempts]] = run(code, [os.getpid(), str(tmp_path)], isolation=isolation).values
    assert set(variables) <= {"LC_CTYPE"}
    assert attempts == ["refused"] * 9
    assert ([path.name for path in tmp_path.iterdir()], file.read_text()) == (["prices"], "kept")


def test_in_namespaces_there_is_nothing_else_and_no_way_to_more() -> None:
    code = """
def f(folders):
    libc = ctypes.CDLL(None)
    installed = [folder for folder in folders if os.access(folder, os.R_OK)]
    own = [libc.unshare(0x10000000), libc.setuid(0), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)]
    return [os.getpid(), os.getppid(), sorted(os.listdir("/tmp")), os.path.exists("/proc"), installed, own]
"""
    sandbox = Sandbox()
    folders = [*site.getsitepackages([sys.base_prefix]), str(ROOT / "producers")]
    outcome = asyncio.run(sandbox.run(f"import ctypes, os\n{code}", "f", [[folders]]))
    if sandbox.isolation == "namespaces":
        assert outcome.values == ([1, 0, [], False, [], [-1, -1, -1]],)
    else:
        assert outcome.values[0][5] == [-1, -1, -1]


def test_a_system_that_refuses_namespaces_is_told_once_and_code_still_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = Sandbox()
    tried = []

    async def refusing(self: Sandbox, isolation: Isolation, *request: Any) -> Outcome:
        tried.append(isolation)
        await asyncio.sleep(0)
        if isolation != "limits":
            raise SandboxFailed(f"no {isolation} here")
        return Outcome(values=(1,), printed="")

    monkeypatch.setattr(Sandbox, "run_in", refusing)

    async def twice() -> None:
        await asyncio.gather(sandbox.run("", "f", [[]]), sandbox.run("", "f", [[]]))

    asyncio.run(twice())
    assert tried == ["namespaces", "landlock", "limits", "limits", "limits"]
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "no landlock here" in str(record.__dict__)


def test_a_sandbox_that_cannot_be_set_up_says_nothing_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.producers.environments.sandbox.FOLDERS", ["/missing"])
    with pytest.raises(SandboxFailed, match="was not set up"):
        run("def f(): return 1", [], isolation="namespaces")
