"""Ctrl-C at any moment ends every command that runs long within two seconds, with one line and nothing left behind."""

import fcntl
import io
import os
import pty
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.tools.top import follow
from rollstream.topics.config import KafkaConfig
from tests.support.interrupting import LIMIT_S, FairTime, assert_ends_at_once, await_listening
from tests.support.producing import SortingGenerator, serving
from tests.support.rounds import rounds
from tests.support.runs import RealRun, rollout, with_batches
from tests.support.settled import settled

SMALL = {
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 3,
    "learner__threads": 1,
    "learner__model__num_hidden_layers": 1,
    "learner__model__hidden_size": 32,
}
ROLES: dict[str, tuple[dict[str, object], float]] = {
    "group": ({}, 3.0),
    "learn": (SMALL, 12.0),
    "infer": (SMALL, 8.0),
    "run": (SMALL, 15.0),
}
TOOLS: dict[str, tuple[tuple[str, ...], float]] = {
    "ledger": (("ledger", "--watch", "0.1", "--json"), 3.0),
    "verify": (("verify",), 2.5),
    "replay": (("replay",), 2.5),
    "cat": (("cat", "rollouts", "--follow"), 3.0),
    "top": (("top",), 3.0),
    "archive": (("archive", "--follow", "--every", "0.1"), 3.0),
    "exclude": (("exclude", "--env", "env"), 3.0),
}


@pytest.fixture(scope="module")
def recorded(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A finished run with batches."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "interrupted", tmp_path_factory.mktemp("run")).prepare()
    try:
        process = run.start("group")
        run.send(rollout(f"x{n}", member) for n in range(24) for member in range(4))
        settled(run, batched=96)
        process.terminate()
        process.wait(300)
        yield run
    finally:
        run.stop()


def moments(few: int) -> list[object]:
    """`few` moments in each run of the tests, and more in the long form."""
    return [pytest.param(few, id="some"), pytest.param(rounds(3), id="more", marks=pytest.mark.long)]


SEED = 7 if os.environ.get("CI") else random.SystemRandom().randrange(1_000_000)


@pytest.mark.parametrize("count", moments(1))
@pytest.mark.parametrize(
    "tool", [pytest.param(t, marks=() if t in ("ledger", "archive") else pytest.mark.long) for t in TOOLS]
)
def test_a_tool_ends_at_once(recorded: RealRun, tmp_path: Path, tool: str, count: int) -> None:
    words, most_s = TOOLS[tool]
    assert_ends_at_once(recorded.command(*words), tmp_path, count, most_s, SEED)


@pytest.mark.parametrize("count", moments(1))
@pytest.mark.parametrize(
    "role", [pytest.param(r, marks=() if r in ("group", "run") else pytest.mark.long) for r in ROLES]
)
def test_a_role_started_by_hand_ends_at_once(real_run: RealRun, role: str, count: int) -> None:
    settings, most_s = ROLES[role]
    if role == "learn":
        with_batches(real_run, 8)  # A learner is refused where somebody else has published.
    elif role != "run":
        real_run.prepare()
    assert_ends_at_once(real_run.command(role, **settings), real_run.directory, count, most_s, SEED)


@pytest.mark.parametrize("count", moments(1))
def test_a_worker_with_groups_in_flight_ends_at_once(real_run: RealRun, count: int) -> None:
    real_run.prepare()
    slow = SortingGenerator(before_generate=lambda _prompts: time.sleep(0.5))
    with serving(slow, replica_id="infer", refresh_ms=1) as server:
        command = real_run.command("env", worker__inference_urls=f'["{server.base_url}"]')
        assert_ends_at_once(command, real_run.directory, count, 4.0, SEED)


@contextmanager
def full_pipe() -> Iterator[int]:
    """The write end of a full pipe that nobody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, bytes(4096))
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


@contextmanager
def closed_pipe() -> Iterator[int]:
    """The write end of a pipe whose read end is closed."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize(
    ("pipe", "words"),
    [
        (full_pipe, ("ledger", "--watch", "0.01", "--json")),
        # It says nothing before the signal.
        pytest.param(closed_pipe, ("cat", "rollouts", "-o", "end", "--follow"), marks=pytest.mark.long),
    ],
    ids=["full", "closed"],
)
def test_nobody_reads_what_is_printed_and_the_command_ends(
    recorded: RealRun, tmp_path: Path, pipe: Callable[[], AbstractContextManager[int]], words: tuple[str, ...]
) -> None:
    with pipe() as unread:
        process = subprocess.Popen(recorded.command(*words), stdout=unread, stderr=unread, cwd=tmp_path)
        try:
            await_listening(process)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2.0)
            with FairTime() as passed:
                process.send_signal(signal.SIGINT)
                assert process.wait(300) == 130
            assert passed.seconds < LIMIT_S
        finally:
            process.kill()
            process.wait()


def test_a_terminal_is_given_back_by_top(recorded: RealRun, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        recorded.command("top"), stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    try:
        while b"\x1b[?25l" not in shown:  # written after the switch to the other screen
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 65536):
                shown += more
        except OSError:
            pass  # the other end is closed
        assert process.wait(300) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert shown.count(b"rollstream: interrupted") == 1
    assert b"Traceback" not in shown


class InterruptedTerminal(io.StringIO):
    """Raises KeyboardInterrupt once, when a command switches to a screen of its own."""

    interrupted = False

    def write(self, text: str) -> int:
        count = super().write(text)
        if "\x1b[?1049h" in text and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return count


def test_a_terminal_is_given_back_where_the_interruption_meets_the_first_frame(recorded: RealRun) -> None:
    terminal = InterruptedTerminal()
    with (
        closing(RunObserver(recorded.kafka, recorded.name, logged=False)) as observer,
        pytest.raises(KeyboardInterrupt),
    ):
        follow(observer, Console(file=terminal, force_terminal=True))
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"
