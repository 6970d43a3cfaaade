"""The start of a run's processes in a terminal: a row for each, with an estimate from last time or from its counts."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rollstream.pipeline.run.start_stages import Stage, StartStages


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Roles:
    """A supervisor of roles that become ready one after the other, a second apart."""

    def __init__(self, clock: Clock, stages: Callable[[], StartStages]) -> None:
        self.clock, self.stages, self.ready = clock, stages, set[str]()
        self.frames: list[str] = []

    def start(self, *specs: Any) -> None:
        self.names = [spec.name for spec in specs]

    def is_ready(self, name: str) -> bool:
        return name in self.ready

    def wait_ready(self, names: Iterable[str], look: Callable[[], None]) -> None:
        for name in names:
            self.stages().note(name, "compiling 3 rows")
            self.frames.append(drawn(self.stages()))
            self.clock.now += 1.0
            self.ready.add(name)
            look()


def drawn(stages: StartStages, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(stages.frame(width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def started(cache: Path, clock: Clock, *names: str, say: Callable[[str], None] | None = None) -> Roles:
    stages = StartStages(cache, say=say, clock=clock)
    roles = Roles(clock, lambda: stages)
    stages.start(roles, *(SimpleNamespace(name=name) for name in names))  # type: ignore[arg-type]
    roles.frames.append(drawn(stages))
    return roles


def test_each_role_has_its_stage_and_the_second_start_an_estimate(tmp_path: Path) -> None:
    clock = Clock()
    first = started(tmp_path / "cache", clock, "learner", "infer-0")
    assert "compiling 3 rows" in first.frames[0]
    assert "left" not in "".join(first.frames)
    assert [line.split("ready after")[1].split()[0] for line in first.frames[-1].splitlines()] == ["1.0", "2.0"]
    second = started(tmp_path / "cache", clock, "infer-0", "new")
    assert "0 s, about 2 s left" in second.frames[0]
    assert second.frames[0].count("left") == 1, "nothing is known of the other role"


def test_without_a_terminal_progress_is_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    started(tmp_path, Clock(), "learner", say=lines.append)
    assert lines == ["learner: compiling 3 rows"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damaged", [b"", b"[1]", b'{"learner": "x"}', b"\xff"])
def test_damaged_times_of_last_time_are_no_times(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "start-times.json").write_bytes(damaged)
    assert "left" not in "".join(started(tmp_path, Clock(), "learner").frames)


@pytest.mark.parametrize(
    ("stage", "share", "estimate"),
    [
        (Stage(0.0), None, "5 s"),
        (Stage(0.0, usual_s=20.0), 0.25, "5 s, about 15 s left"),
        (Stage(0.0, usual_s=4.0), 0.99, "5 s, usually 4 s"),
        (Stage(0.0, text="update 30 of 60, loss 2.1", counted=(3.0, 10)), 0.5, "5 s, about 3 s left"),
        (Stage(0.0, text="update 60 of 60", counted=(3.0, 10)), 1.0, "5 s"),
        (Stage(0.0, text="update 0 of 60", counted=(3.0, 0)), 0.0, "5 s"),
        (Stage(0.0, text="update 30 of 60"), 0.5, "5 s"),
        (Stage(0.0, text="compiling 4 rows of 64 tokens"), None, "5 s"),
        (Stage(0.0, text="0 of 0"), None, "5 s"),
        (Stage(0.0, usual_s=9.0, ready_s=3.21), 1.0, "ready after 3.2 s"),
    ],
)
def test_shares_and_estimates(stage: Stage, share: float | None, estimate: str) -> None:
    assert stage.share(5.0) == share
    assert stage.estimate(5.0) == estimate


def test_a_stage_that_counts_is_timed_from_its_first_number() -> None:
    stage = Stage(0.0)
    stage.note("compiling", 30.0)
    stage.note("update 1 of 5", 40.0)
    stage.note("update 3 of 5", 50.0)
    assert stage.estimate(50.0) == "50 s, about 10 s left"
