"""TrackioTracker: a run of trackio, kept on this machine, or by a Space or server that the options name."""

import contextlib
import os
import sys
from typing import Any

from rollstream.consumers.trackers.tracker import TrackedRun, TrackedStep, tracker_package

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
