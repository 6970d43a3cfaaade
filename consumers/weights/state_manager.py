"""The newest weights by version: who trains updates them, and each who asks gets them where it has another version.

Over the log, between processes, or within one, for notebooks. The first update is version 0, each adds one, the newest
is what is given; every asker says which version it has, so none is served in place of another.
"""

import threading
from contextlib import ExitStack, closing
from typing import Any, Protocol

import numpy as np

from consumers.closing import Closing
from consumers.learner.step_log import StepLog
from consumers.weights.config import WeightsConfig
from consumers.weights.follower import WeightsFollower
from consumers.weights.publisher import WeightsPublisher
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded
from topics.trajectories import Tree, flatten, map_leaves, nest

State = tuple[int, dict[str, Any]]
"""A version and its parameters: numpy arrays in nested dicts, read-only."""


class States(Protocol):
    """What both forms are to a trainer and to those who act."""

    def update_state(self, params: Tree) -> int:
        """Make these parameters the newest version, and return which that is.

        Arrays (JAX's too) in mappings of any depth, by names without `/`. They are copied: the caller may go on
        changing them.
        """

    def get_state(self, version: int = -1) -> State | None:
        """The newest version, unless `version` is that or there is none; -1 for who has none. Does not wait."""

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """The newest version once it is at least that. Raises DeadlineExceeded."""


class LocalStateManager:
    """Within one process; any thread may update and ask."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: State = (-1, {})

    def update_state(self, params: Tree) -> int:
        """See States. Raises RecordError for names that make no path."""
        flatten(params)
        copied = map_leaves(_read_only, params)
        with self._changed:
            self._state = (self._state[0] + 1, copied)
            self._changed.notify_all()
            return self._state[0]

    def get_state(self, version: int = -1) -> State | None:
        """See States."""
        with self._changed:
            return None if self._state[0] in (version, -1) else self._state

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """See States."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state[0] >= max(0, version_at_least), timeout_s):
                raise DeadlineExceeded(
                    f"version {version_at_least} did not appear within {timeout_s:g} s (newest: {self._state[0]}); "
                    "does anyone call update_state?"
                )
            return self._state


class StateManager(Closing):
    """Over a run's `weights` and `policies`, for a process that trains, one that acts, or one that does both.

    Who updates is the learner `name` of the run, its one publisher: whoever was it before gets Fenced at its next
    update. Who only asks needs no right to write. One thread updates; any may ask.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        name: str = "default",
        model: str = "{}",
        config: WeightsConfig | None = None,
        take_over: bool = False,
    ) -> None:
        """`model` describes the parameters to whoever reads the manifest, `take_over` allows to update where a learner
        of another name published last. Connects when it is first used."""
        self._take_over = take_over
        self._kafka, self._run, self._name, self._model = kafka, run, name, model
        self._config = config or WeightsConfig()
        self._opening = threading.Lock()
        self._stack = ExitStack()
        self._writing: tuple[StepLog, WeightsPublisher] | None = None
        self._following: WeightsFollower | None = None

    def update_state(self, params: Tree) -> int:
        """See States; when it returns the version is committed. The first call takes the place of who updated before.

        Raises Fenced when another took this one's place, StateRefused where a learner of another name publishes,
        DeliveryError and BrokerUnavailable when it cannot be published, and then the version is not there.
        """
        arrays = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
        log, publisher = self._writers()
        # Each update counts as a step: a learner that has steps of its own publishes by itself.
        manifest = publisher.stage(publisher.latest_version + 1, arrays)
        log.commit([publisher.record(manifest)])
        publisher.committed(manifest)
        return manifest.version

    def get_state(self, version: int = -1) -> State | None:
        """See States; the first call begins to follow. Raises what ended the following."""
        found = self._follower().get_state(version)
        return None if found is None else (found[0], nest(found[1]))

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """See States. Raises what ended the following, too."""
        version, arrays = self._follower().wait_for(max(0, version_at_least), timeout_s)
        return version, nest(arrays)

    def close(self) -> None:
        """Stop following, and see that what was published is with the broker."""
        with self._opening:
            self._stack.close()

    def _writers(self) -> tuple[StepLog, WeightsPublisher]:
        with self._opening:
            if self._writing is None:
                # In this order: building the log fences the publisher's predecessor.
                log = StepLog(self._kafka, self._run, self._name, take_over=self._take_over)
                self._stack.enter_context(closing(log))
                publisher = WeightsPublisher(self._kafka, self._run, self._name, self._model, self._config)
                self._writing = log, self._stack.enter_context(closing(publisher))
            return self._writing

    def _follower(self) -> WeightsFollower:
        with self._opening:
            if self._following is None:
                self._following = self._stack.enter_context(
                    WeightsFollower(self._kafka, self._run, config=self._config)
                )
            return self._following


def _read_only(leaf: Any) -> np.ndarray[Any, Any]:
    copied = np.array(leaf)
    copied.flags.writeable = False
    return copied
