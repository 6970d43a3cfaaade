"""Verifiers that hang, crash or take all memory fail their own call; the next one is scored."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.producers.environments import verifier_pool
from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.environments.verifier_pool import VerifierFailed, VerifierPool
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.secrets import keep_from_programs, program_environment
from tests.support.waiting import eventually

SOURCE = """
import os, signal, subprocess, sys, time
from rollstream import Score

def judge(prompt, text):
    if text == "hang":
        while True:
            pass
    if text == "sleep":
        print("noise of a verifier")
        child = subprocess.Popen(["sleep", "600"])
        open(prompt.extra["pids"], "w").write(f"{os.getpid()} {child.pid}")
        child.wait()
    if text == "crash and leave a process":
        child = subprocess.Popen(["sleep", "600"])
        open(prompt.extra["pids"], "w").write(f"{os.getpid()} {child.pid}")
        os._exit(3)
    if text == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "exit":
        sys.exit(3)
    if text == "greedy":
        return len(bytearray(1 << 32))
    if text == "slowly greedy":
        held = []
        while True:
            held.append(bytearray(1 << 24))
    if text == "raise":
        raise ValueError("no such answer")
    if text == "nan":
        return float("nan")
    if text == "environment":
        return Score(reward=1.0, components={name: 1.0 for name in os.environ})
    if text == "none":
        return None
    if text == "long":
        return Score(reward=1.0, components={"x" * (2 << 20): 1.0})
    exact = float(text == prompt.answer)
    return Score(reward=exact - 0.5, components={"exact": exact, "process": float(os.getpid())})
"""
PROMPT = Prompt(example_id="x", text="6*7=", answer="42")


def score_module_level(prompt: Prompt, text: str) -> float:
    return 1.0 if text == prompt.answer else -1.0


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "judging.py"
    path.write_text(SOURCE)
    return f"{path}:judge"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


async def score_or_failure(pool: VerifierPool, text: str, prompt: Prompt = PROMPT) -> Score | str:
    try:
        return await pool(prompt, text)
    except VerifierFailed as failed:
        return str(failed)


def test_answers_are_scored_in_processes_of_their_own_which_serve_many_calls(source: str) -> None:
    with VerifierPool(source, processes=2, timeout_s=60) as pool:

        async def play() -> list[Score]:
            return list(await asyncio.gather(*(pool(PROMPT, str(n)) for n in range(36, 48))))

        scores = run(play())
    assert [score.reward for score in scores] == [0.5 if n == 42 else -0.5 for n in range(36, 48)]
    processes = {score.components["process"] for score in scores}
    assert 1 <= len(processes) <= 2
    assert os.getpid() not in processes
    assert not any(psutil.pid_exists(int(pid)) for pid in processes)


def test_a_verifier_is_given_no_variable_that_holds_a_secret(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAFKA_PASSWORD_OF_A_TEST", "LIBRARY_KEY_OF_A_TEST"):
        monkeypatch.setenv(name, "a secret")
    keep_from_programs(["KAFKA_PASSWORD_OF_A_TEST"])
    with VerifierPool(source, processes=1, timeout_s=60) as pool:
        score = run(pool(PROMPT, "environment"))
    assert "LIBRARY_KEY_OF_A_TEST" in score.components
    assert "KAFKA_PASSWORD_OF_A_TEST" not in score.components
    assert "KAFKA_PASSWORD_OF_A_TEST" in program_environment(["env:KAFKA_PASSWORD_OF_A_TEST"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "gave no score within 3 s"),
        ("crash", "ended with -11"),
        ("exit", "SystemExit: 3"),
        ("greedy", "MemoryError"),
        ("slowly greedy", "MemoryError"),
        ("raise", "ValueError: no such answer"),
        ("nan", "reward nan, which is not a finite number"),
        ("none", "TypeError"),
        ("long", "more than 1,048,576 bytes"),
    ],
)
def test_a_verifier_that_fails_fails_one_call_and_the_next_is_scored(source: str, text: str, reason: str) -> None:
    async def play(pool: VerifierPool) -> list[Score | str]:
        return [await score_or_failure(pool, each) for each in ("42", text, "42")]

    with VerifierPool(source, processes=1, timeout_s=3 if text == "hang" else 60, memory_bytes=1 << 28) as pool:
        before, failure, after = run(play(pool))
    assert isinstance(before, Score), before
    assert isinstance(after, Score), after
    assert (before.reward, after.reward) == (0.5, 0.5)
    assert reason in failure


def test_others_are_scored_while_one_hangs(source: str) -> None:
    async def play(pool: VerifierPool) -> tuple[list[Score], bool]:
        hanging = asyncio.ensure_future(score_or_failure(pool, "hang"))
        scores = [await pool(PROMPT, "42") for _ in range(20)]
        early = not hanging.done()
        pool.close()
        assert "the process of the verifier" in str(await hanging)
        return scores, early

    with VerifierPool(source, processes=2, timeout_s=600) as pool:
        scores, early = run(play(pool))
    assert [score.reward for score in scores] == [0.5] * 20
    assert early


@pytest.mark.parametrize(
    ("text", "timeout_s", "reason"),
    [("sleep", 4, "no score within"), ("crash and leave a process", 60, "ended with 3")],
)
def test_what_a_verifier_started_ends_with_it(
    source: str, tmp_path: Path, text: str, timeout_s: float, reason: str
) -> None:
    pids = tmp_path / "pids"
    prompt = Prompt(example_id="x", text="", extra={"pids": str(pids)})
    with VerifierPool(source, processes=1, timeout_s=timeout_s) as pool:
        assert reason in str(run(score_or_failure(pool, text, prompt)))
    for pid in map(int, pids.read_text().split()):
        eventually(lambda pid=pid: not alive(pid), 60, f"process {pid} has ended")  # type: ignore[misc]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("hangs", ["in a call", "when it is imported"])
def test_a_process_and_what_it_started_end_with_a_pool_that_is_killed(source: str, tmp_path: Path, hangs: str) -> None:
    pids = tmp_path / "pids"
    prompt = Prompt(example_id="x", text="", extra={"pids": str(pids)})
    if hangs == "when it is imported":
        path = tmp_path / "importing.py"
        path.write_text(f"import json, types\nprompt = types.SimpleNamespace(extra={dict(prompt.extra)!r})\n{SOURCE}\n")
        path.write_text(path.read_text() + "judge(prompt, 'sleep')\n")
        source = f"{path}:judge"
    owner = os.fork()
    if owner == 0:
        try:
            run(VerifierPool(source, processes=1, timeout_s=600)(prompt, "sleep"))
        finally:
            os._exit(0)
    started = eventually(
        lambda: pids.exists() and len(pids.read_text().split()) == 2 and pids.read_text(), 60, "it runs"
    )
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    for pid in map(int, started.split()):
        eventually(lambda pid=pid: not alive(pid), 60, f"process {pid} has ended")  # type: ignore[misc]


def test_a_class_is_made_once_in_each_process_and_called(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(
        "class Counter:\n    def __init__(self):\n        self.calls = 0\n\n"
        "    def __call__(self, prompt, text):\n        self.calls += 1\n        return self.calls\n"
    )
    with VerifierPool(f"{tmp_path}/counting.py:Counter", processes=1, timeout_s=60) as pool:
        assert [run(pool(PROMPT, "")).reward for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_function_of_a_module_is_found_by_its_name_and_another_is_refused() -> None:
    with VerifierPool(score_module_level, processes=1, timeout_s=60) as pool:
        assert run(pool(PROMPT, "42")) == Score(reward=1.0)
    with pytest.raises(ConfigurationError, match="make it a function of a module"):
        VerifierPool(lambda prompt, text: 1.0)
    with (
        VerifierPool("no.such:thing", processes=1) as pool,
        pytest.raises(ConfigurationError, match=r"no\.such"),
    ):
        run(pool(PROMPT, "42"))
    with pytest.raises(ConfigurationError, match="timeout_s > 0"):
        VerifierPool(score_module_level, timeout_s=0)


def test_a_script_without_a_guard_that_calls_a_pool_starts_no_further_processes(tmp_path: Path) -> None:
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(f"""
import asyncio, os, pathlib
from rollstream import Prompt, VerifierPool

with open({str(started)!r}, "a") as file:
    print(os.getpid(), file=file)
if len(pathlib.Path({str(started)!r}).read_text().split()) > 3:
    raise SystemExit("it goes on without end")

def judge(prompt, text):
    return 1.0

async def main():
    with VerifierPool(judge, processes=1, timeout_s=60) as pool:
        print((await pool(Prompt(example_id="1", text="x", answer="1"), "1")).reward)

asyncio.run(main())
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "which calls a pool again" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr
    assert len(started.read_text().split()) == 2


def test_a_verifier_that_hangs_when_it_is_imported_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_pool, "START_TIMEOUT_S", 5.0)
    path = tmp_path / "hanging.py"
    path.write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")

    with VerifierPool(f"{path}:judge", processes=1, timeout_s=60) as pool:
        assert "gave no score within 5 s" in str(run(score_or_failure(pool, "42")))
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
