"""JsonLinesTracker: a file of JSON lines with the figures of each step, without traces."""

import json
import math
import os
from pathlib import Path

from rollstream.consumers.trackers.tracker import TrackedRun, TrackedStep, put_aside

TAIL_BYTES = 1 << 16
"""Number of bytes read at once from the end of a file, to find its last step."""


class JsonLinesTracker:
    """One object a step in {directory}/{run}/{learner}.jsonl: run, learner, step, policy_version, timestamp and all
    figures; null if not finite."""

    def __init__(self, tracked: TrackedRun) -> None:
        path = tracked.directory / tracked.run / f"{tracked.learner}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last = _cut_and_read_last(path)
        if self.last > tracked.newest_step:
            put_aside(path, self.last, tracked.newest_step)
            self.last = -1
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: TrackedStep) -> None:
        fields = {
            "run": step.run,
            "learner": step.learner,
            "step": step.step,
            "policy_version": step.policy_version,
            "timestamp": step.timestamp,
        }
        figures = {name: value if math.isfinite(value) else None for name, value in step.metrics.items()}
        self._file.write(json.dumps({**fields, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_and_read_last(path: Path) -> int:
    """Return the step of the last line, -1 if there is none, and cut off a partial line left by a crash."""
    if not path.exists():
        return -1
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        # Read backward until the tail holds a whole line: it has two line ends, or begins at the start of the file.
        while start and tail.count(b"\n") < 2:
            start = max(0, start - TAIL_BYTES)
            file.seek(start)
            tail = file.read(size - start)
        whole = tail[: tail.rfind(b"\n") + 1]
        file.truncate(start + len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else -1
