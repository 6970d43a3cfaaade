"""The built-in trackers: JSON lines, TensorBoard, trackio and Weights & Biases, each imported when it is opened."""

import contextlib
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from rollstream.consumers.trackers.tracker import (
    TrackedRun,
    TrackedStep,
    note_new_beginning,
    put_aside,
    tracker_package,
)
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import read_json, write_json

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


class TensorBoardTracker:
    """Events below {directory}/{run}/{learner}; those that a crash left beyond the last step are purged at opening.

    It does not use tensorboardX's SummaryWriter, which writes in a thread that cannot be awaited.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        tensorboard = tracker_package("tensorboardX")
        directory = tracked.directory / tracked.run / tracked.learner
        directory.mkdir(parents=True, exist_ok=True)
        self._state_path = directory / "rollstream.json"
        self.last = int(read_json(self._state_path)["last"]) if self._state_path.exists() else -1
        if self.last > tracked.newest_step:
            note_new_beginning(directory, self.last, tracked.newest_step)
            self.last = -1
        self._proto: Any = tensorboard.proto.event_pb2
        self._scalar: Any = tensorboard.summary.scalar
        # TensorBoard reads files in the order of their names, which begin with the time of creation in seconds.
        suffix = f".{self.last + 1:09d}"
        self._writer: Any = tensorboard.event_file_writer.EventsWriter(str(directory / "events"), suffix)
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=self.last + 1, session_log=start))

    def write(self, step: TrackedStep) -> None:
        summary = self._proto.Event().summary
        for name, value in step.metrics.items():
            if math.isfinite(value):
                summary.MergeFrom(self._scalar(name, value))
        self._writer.write_event(self._proto.Event(wall_time=step.timestamp, step=step.step, summary=summary))
        self._writer.flush()
        write_json(self._state_path, {"last": step.step})

    def close(self) -> None:
        self._writer.close()


TRACES = "rollouts"
"""Name under which the traces of a step are logged."""


class TrackioTracker:
    """A run of trackio, named after a run and a learner; it is continued where it ended."""

    def __init__(self, tracked: TrackedRun) -> None:
        directory = tracked.directory / "trackio"
        directory.mkdir(parents=True, exist_ok=True)
        # trackio reads the variable when the package is imported.
        os.environ.setdefault("TRACKIO_DIR", str(directory))
        self._trackio: Any = tracker_package("trackio")
        self._tracked = tracked
        self._run = self._opened("allow")
        if self.last > tracked.newest_step:
            # trackio continued an older run of this name. Open a new run of this name; trackio keeps both.
            self.close()
            self._run = self._opened("never")

    def _opened(self, resume: str) -> Any:
        tracked = self._tracked
        # trackio prints to stdout, which is for the output of the command.
        with contextlib.redirect_stdout(sys.stderr):
            run = self._trackio.init(
                project=tracked.config.project,
                name=f"{tracked.run}/{tracked.learner}",
                group=tracked.run,
                config={"run": tracked.run, "learner": tracked.learner},
                resume=resume,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                **tracked.config.options,
            )
        # The step that trackio would assign next, which it also determines for a remote run that is resumed.
        self.last = int(run._next_step) - 1
        return run

    def write(self, step: TrackedStep) -> None:
        figures: dict[str, Any] = {**step.metrics, "policy_version": step.policy_version}
        if step.traces:
            figures[TRACES] = [self._trackio.Trace(t.messages, metadata=t.metadata, spans=t.spans) for t in step.traces]
        self._run.log(figures, step=step.step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            # If the run's own method `finish` were called, trackio would finish the run again when the process exits.
            self._trackio.finish()


class WandbTracker:
    """A run below {directory} with one id for each learner, which the next start continues; offline unless the option
    `mode` is online.

    The state file names a step before the step is logged: logged figures cannot be withdrawn, so a crash between
    the two loses the figures of the step in this tracker, but never repeats them.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        wandb = tracker_package("wandb")
        mode = tracked.config.options.get("mode", "offline")
        if mode not in ("offline", "online"):
            raise ConfigurationError(f"tracker.options.mode is {mode!r}; it must be offline or online")
        tracked.directory.mkdir(parents=True, exist_ok=True)
        self._path = tracked.directory / f"{tracked.run}.{tracked.learner}.json"
        state: dict[str, Any] = read_json(self._path) if self._path.exists() else {}
        self.last = int(state.get("last", -1))
        if self.last > tracked.newest_step:
            put_aside(self._path, self.last, tracked.newest_step)
            state, self.last = {}, -1
        # Random, because the service must see a new run if the same names are used on another machine, or after a run
        # was deleted.
        self._id = str(state.get("id") or hashlib.sha256(os.urandom(16)).hexdigest()[:12])
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run: Any = wandb.init(
            mode=mode,
            project=tracked.config.project,
            dir=str(tracked.directory),
            id=self._id,
            name=f"{tracked.run}/{tracked.learner}",
            resume="allow",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )

    def write(self, step: TrackedStep) -> None:
        write_json(self._path, {"id": self._id, "last": step.step})
        self._run.log({**step.metrics, "policy_version": step.policy_version}, step=step.step, commit=True)

    def close(self) -> None:
        self._run.finish()
