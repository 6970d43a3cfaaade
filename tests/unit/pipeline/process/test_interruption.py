"""Ctrl-C without a broker: before anything is loaded, while a client waits in vain, while processes compute."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.pipeline.audit.process_pool import ProcessLost, spread
from tests.support.command_line import in_full
from tests.support.interrupting import LIMIT_S, LINE, FairTime, assert_ends_at_once, interrupt
from tests.support.paths import ROOT
from tests.support.waiting import eventually

NOBODY = "127.0.0.1:1"
SEED = 7 if os.environ.get("CI") else random.SystemRandom().randrange(1_000_000)
COMMANDS = (
    *("topics plan", "ledger --watch 0.1 --json", "verify", "replay", "top", "runs", "cat rollouts --follow"),
    *("exclude --env e", "group", "learn", "infer", "env", "run"),
)


def command(words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("rollstream")), *in_full(words.split()), "-b", NOBODY]


@pytest.mark.parametrize("words", ["ledger", pytest.param("run", marks=pytest.mark.long)])
def test_ctrl_c_while_a_command_is_still_loaded_is_one_line(words: str, tmp_path: Path) -> None:
    assert_ends_at_once(command(words), tmp_path, 8, 0.1, SEED)


@pytest.mark.parametrize(
    ("words", "moments"),
    [("ledger", 1), ("group", 1), *(pytest.param(words, 8, marks=pytest.mark.long) for words in COMMANDS)],
)
def test_ctrl_c_ends_a_command_while_no_broker_answers(words: str, moments: int, tmp_path: Path) -> None:
    assert_ends_at_once(command(words), tmp_path, moments, 5.0, SEED)


def test_a_second_ctrl_c_ends_a_command_at_once(tmp_path: Path) -> None:
    """The command waits in a library, and was asked to end once before."""
    script = tmp_path / "deaf.py"
    script.write_text(
        "import ctypes, sys\n"
        "from rollstream.pipeline.process import interruption\n"
        "interruption.GRACE_S = 60.0\n"
        "interruption.take_over()\n"
        "lock = ctypes.create_string_buffer(128)\n"
        "wait = ctypes.CDLL(None).pthread_mutex_lock\n"
        "try:\n"
        "    print('deaf', flush=True)\n"
        "    wait(lock), wait(lock)  # a signal does not end this wait\n"
        "except KeyboardInterrupt:  # it came before\n"
        "    wait(lock), wait(lock)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "deaf\n"

    def asked() -> bool:
        process.send_signal(signal.SIGINT)
        return process.poll() is not None

    eventually(asked, 60, "the end", every_s=0.2)
    assert (process.returncode, process.communicate()[1]) == (130, f"{LINE}\n")


def test_a_command_ends_after_its_line_is_printed_whichever_thread_prints_it(tmp_path: Path) -> None:
    """The command has cleaned up at the moment at which it would be ended by force."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, signal, threading, time\n"
        "from rollstream.pipeline.process import interruption\n"
        "printing, write = threading.Event(), os.write\n"
        "def slowly(number, line):\n"
        "    if threading.current_thread() is not threading.main_thread():\n"
        "        printing.set()\n"
        "        time.sleep(0.1)  # as on a busy machine\n"
        "    return write(number, line)\n"
        "os.write = slowly\n"
        "interruption.GRACE_S = 0.0\n"
        "interruption.take_over()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    printing.wait(60)\n"
        "except KeyboardInterrupt:\n"
        "    printing.wait(60)\n"
        "    interruption.end()\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, f"{LINE}\n")


JOBS = """
import sys, time
from pathlib import Path
from rollstream.pipeline.process import interruption
from rollstream.pipeline.audit.process_pool import spread
HERE = Path(__file__).parent

def work(number):
    (HERE / f"job-{number}").touch()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    return number

if __name__ == "__main__":
    interruption.take_over()
    try:
        print(sorted(spread(work, range(int(sys.argv[1])), 2)))
    except KeyboardInterrupt:
        interruption.end()
"""


STARTED = """
import os, signal, threading, time
from multiprocessing import util
begin = threading.Thread.start

def slowly(thread):
    begin(thread)
    time.sleep(0.2)  # As on a busy machine: the thread works before who started it goes on.

threading.Thread.start = slowly
spawn = util.spawnv_passfds
interruption.GRACE_S = 60.0  # A busy machine may take longer to start a process than a command may to end.

def interrupted(path, words, passed):
    child = spawn(path, words, passed)
    if not any("resource_tracker" in str(word) for word in words):
        # Before the child is told what to do.
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
    return child

util.spawnv_passfds = interrupted
"""


def test_ctrl_c_while_a_process_is_started_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "jobs.py"
    script.write_text(JOBS.replace('if __name__ == "__main__":', f'if __name__ == "__main__":\n    exec({STARTED!r})'))
    ended = subprocess.run(
        [sys.executable, str(script), "500"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", f"{LINE}\n")


def test_no_job_begins_after_ctrl_c_and_no_process_is_left(tmp_path: Path) -> None:
    script = tmp_path / "jobs.py"
    script.write_text(JOBS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script), "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        eventually(lambda: len(list(tmp_path.glob("job-*"))) > 2, 60, "jobs")
        with FairTime() as passed:
            os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal does
            output, errors = process.communicate(timeout=300)
        assert passed.seconds < LIMIT_S
    assert (process.returncode, output, errors) == (130, "", f"{LINE}\n")
    # Only jobs that had begun before the signal are done, because no process is left to begin others.
    eventually(lambda: no_group(process.pid), 60, "the end of the processes that computed")
    assert len(list(tmp_path.glob("job-*"))) < 500


def no_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return True
    return False


def test_jobs_spread_over_processes_give_all_answers(tmp_path: Path) -> None:
    assert sorted(spread(abs, range(-5, 0), 2)) == [1, 2, 3, 4, 5]
    assert list(spread(abs, [-1], 2)) == [1]


def test_an_error_of_a_job_is_raised_with_where_it_came_from() -> None:
    with pytest.raises(ValueError, match="invalid literal") as raised:
        list(spread(int, ["1", "x", "3"], 2))
    assert "in _serve" in raised.value.__notes__[0]


def test_a_process_that_is_killed_at_its_job_is_an_error_that_says_so() -> None:
    with pytest.raises(ProcessLost, match=r"ended with 3 before it had answered"):
        list(spread(os._exit, [3, 3], 2))


def test_a_command_that_is_done_is_not_interrupted(tmp_path: Path) -> None:
    assert interrupt(command("--help")[:2], tmp_path / "log", 30.0) is None
