"""The start of a run's processes: in a terminal a row for each with its stage, a bar and an estimate, else plain lines.

The estimate is what the same role of this machine took last time, or follows from a stage that counts, as in `update 60
of 300`.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.progress_bar import ProgressBar
from rich.table import Table

from rollstream.pipeline.command_line.text_tables import printable
from rollstream.pipeline.run.display import Display
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.topics.files.atomic_files import write_json

_COUNTS = re.compile(r"(\d+) of (\d+)")


@dataclass
class Stage:
    """How far the start of one role is."""

    began: float
    """By the clock of StartStages, in seconds."""
    usual_s: float | None = None
    """How long it took last time; None if that is not known."""
    text: str = "starting"
    ready_s: float | None = None
    """How long it took; None until it is ready."""
    counted: tuple[float, int] | None = None
    """When its first stage that counts was at which number."""

    def note(self, text: str, now: float) -> None:
        """Note a progress line."""
        self.text = text
        if self.counted is None and (counts := _COUNTS.search(text)):
            self.counted = now, int(counts[1])

    def share(self, now: float) -> float | None:
        """Return the share that is done: as its stage counts, or by the time of last time; None if unknown."""
        if self.ready_s is not None:
            return 1.0
        counts = _COUNTS.search(self.text)
        if counts and int(counts[2]):
            return min(int(counts[1]) / int(counts[2]), 1.0)
        return min((now - self.began) / self.usual_s, 0.99) if self.usual_s else None

    def estimate(self, now: float) -> str:
        """Return how long it takes, in words."""
        if self.ready_s is not None:
            return f"ready after {self.ready_s:.1f} s"
        elapsed = now - self.began
        if self.usual_s is None:
            left_s = self._counted_left_s(now)
            return f"{elapsed:.0f} s" + (f", about {left_s:.0f} s left" if left_s else "")
        left = self.usual_s - elapsed
        return (
            f"{elapsed:.0f} s, about {left:.0f} s left"
            if left > 0
            else f"{elapsed:.0f} s, usually {self.usual_s:.0f} s"
        )

    def _counted_left_s(self, now: float) -> float | None:
        """Return how long the stage goes on at the rate so far; None if that is not known."""
        counts = _COUNTS.search(self.text)
        if self.counted is None or counts is None or int(counts[1]) <= self.counted[1]:
            return None
        since, first = self.counted
        return (now - since) / (int(counts[1]) - first) * (int(counts[2]) - int(counts[1]))


class StartStages:
    """Starts roles and shows their stages until they are ready."""

    def __init__(
        self,
        cache: Path,
        *,
        json: bool = False,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The folder `cache` keeps the seconds that each role took. `say` prints a line if there is no terminal."""
        self._path, self._say, self._clock = cache / "start-times.json", say, clock
        self._usual = _read(self._path)
        self.stages: dict[str, Stage] = {}
        self._display: Display[StartStages] = Display(
            json=json, began=clock(), line=lambda stages: "", frame=StartStages.frame
        )

    def note(self, role: str, progress: str) -> None:
        """Note a progress line of a role's start."""
        if role in self.stages:
            self.stages[role].note(progress, self._clock())
        if self._say is not None and not self._display.on_terminal:
            self._say(f"{role}: {progress}")

    def start(self, supervisor: Supervisor, *specs: RoleSpec) -> None:
        """Start roles and wait until they are ready. Raises the errors of `Supervisor.wait_ready`."""
        names = [spec.name for spec in specs]
        self.stages = {name: Stage(self._clock(), self._usual.get(name)) for name in names}
        supervisor.start(*specs)

        def look() -> None:
            for name, stage in self.stages.items():
                if stage.ready_s is None and supervisor.is_ready(name):
                    stage.ready_s = self._clock() - stage.began
            if self._display.on_terminal:
                self._display.show(self)

        with self._display.live():
            supervisor.wait_ready(names, look)
        self._usual |= {name: stage.ready_s for name, stage in self.stages.items() if stage.ready_s is not None}
        with suppress(OSError):  # The next start then has no estimate.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._usual)

    def frame(self, width: int) -> Table:
        """Return a row for each role."""
        now = self._clock()
        grid = Table.grid(padding=(0, 2))
        for least in (max(map(len, self.stages), default=0), 4, 20, 0):
            grid.add_column(no_wrap=True, overflow="ellipsis", min_width=least)
        for name, stage in self.stages.items():
            share = stage.share(now)
            bar = ProgressBar(total=1.0, completed=share or 0.0, pulse=share is None, width=min(24, width // 4))
            text = "" if stage.ready_s is not None else printable(stage.text)
            grid.add_row(name, bar, stage.estimate(now), text)
        return grid

    def restore(self) -> None:
        """Restore the terminal's cursor, for a process that is about to end at once."""
        self._display.restore()


def _read(path: Path) -> dict[str, float]:
    """Return the seconds of each role; none if there is no sound file."""
    with suppress(OSError, msgspec.DecodeError):
        times = msgspec.json.decode(path.read_bytes())
        if isinstance(times, dict):
            return {name: float(value) for name, value in times.items() if isinstance(value, int | float)}
    return {}
