"""The interface of trackers, and their input: steps with figures and traces of rollouts, as plain values.

A tracker reports the last step that it has, so filling continues there after any interruption.
"""

import importlib
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rollstream.consumers.trackers.config import TrackerConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.logs import event
from rollstream.topics.user_code import load_object

TRACKERS = {
    "trackio": "rollstream.consumers.trackers.trackers:TrackioTracker",
    "wandb": "rollstream.consumers.trackers.trackers:WandbTracker",
    "tensorboard": "rollstream.consumers.trackers.trackers:TensorBoardTracker",
    "jsonl": "rollstream.consumers.trackers.trackers:JsonLinesTracker",
}
"""Built-in trackers, by their names in `tracker.to`."""


@dataclass(frozen=True, kw_only=True)
class RolloutTrace:
    """One rollout as trackers show it."""

    messages: list[dict[str, Any]]
    """Turns in OpenAI's form: role and content."""
    metadata: dict[str, Any]
    """Reward, advantage, environment, version, fate, place on the log and more, as plain values."""
    spans: list[dict[str, Any]]
    """Generations of the policy, with their durations if the server reported them."""


@dataclass(frozen=True, kw_only=True)
class TrackedStep:
    """One step of a learner."""

    run: str
    learner: str
    step: int
    policy_version: int
    timestamp: float
    """Time at which the step was executed, in seconds since the Unix epoch."""
    metrics: Mapping[str, float]
    """Figures of the step, and the figures of other components at that time, prefixed with the component's name."""
    traces: tuple[RolloutTrace, ...]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run and learner that a tracker is opened for, with its settings."""

    run: str
    learner: str
    newest_step: int
    """The learner's newest step on record. A tracker with later steps holds an older run of the same name."""
    directory: Path
    config: TrackerConfig


class Tracker(Protocol):
    """One place that is filled with the steps of one learner. Its class is called with a TrackedRun."""

    last: int
    """The newest step that the tracker has when it is opened; -1 if there is none."""

    def write(self, step: TrackedStep) -> None:
        """Write a step; steps arrive in ascending order, each above `last` and each once."""

    def close(self) -> None:
        """Return once everything written is stored."""


def open_tracker(tracked: TrackedRun) -> Tracker:
    """Open the tracker that `tracker.to` names. Raises ConfigurationError if no tracker has that name."""
    name = tracked.config.to
    kind = f"a tracker is one of {', '.join(TRACKERS)}, or a class, named package.module:Class"
    if not name:
        raise ConfigurationError(f"no tracker is named; set tracker.to or give --to: {kind}")
    make: Callable[[TrackedRun], Tracker] = load_object(TRACKERS.get(name, name), "tracker.to names", kind)
    return make(tracked)


def tracker_package(name: str) -> ModuleType:
    """Import the package of a tracker. Raises ConfigurationError, naming the extra, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"tracker.to needs {name}, which is not installed: pip install 'rollstream[sinks]'"
        ) from error


logger = logging.getLogger(__name__)


def put_aside(path: Path, last: int, newest_step: int) -> None:
    """Rename a file whose last step is later than the newest step of the run."""
    earlier = list(path.parent.glob(f"{path.name}.*"))
    # Some of the earlier files may have been deleted, and renaming would replace a file.
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(len(earlier) + 1))
    path.rename(next(name for name in names if not name.exists()))
    note_new_beginning(path, last, newest_step)


def note_new_beginning(path: Path, last: int, newest_step: int) -> None:
    """Log that a tracker begins anew."""
    event(
        logger, "tracker_begun_anew", level=logging.WARNING, path=str(path), held_step=last, recorded_step=newest_step
    )
