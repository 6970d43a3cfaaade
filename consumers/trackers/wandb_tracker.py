"""WandbTracker: a run of Weights & Biases with the figures of each step."""

import hashlib
import os
from typing import Any

from rollstream.consumers.files.atomic_files import read_json, write_json
from rollstream.consumers.trackers.tracker import TrackedRun, TrackedStep, put_aside, tracker_package
from rollstream.topics.errors import ConfigurationError


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
