"""State managers: trainers update the weights, and actors get the newest weights if they hold a different version.

StateManager works between processes, over the log; LocalStateManager works within one process, for notebooks. The
first update is version 0 and each update adds one. Each actor passes the version that it holds, so actors do
not affect each other.
"""

import threading
from contextlib import ExitStack, closing
from typing import Any, Protocol

import numpy as np

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.wire.trajectory_arrays import Tree, flatten, map_leaves, nest

State = tuple[int, dict[str, Any]]
"""A version and its parameters: numpy arrays in nested dicts, read-only."""


class PolicyStates(Protocol):
    """The interface of both state managers."""

    def update_state(self, params: Tree) -> int:
        """Make these parameters the newest version, and return its number.

        They are arrays, including JAX arrays, in mappings of any depth, with names without `/`. They are copied, so the
        caller may change them afterwards.
        """

    def get_state(self, version: int = -1) -> State | None:
        """Return the newest state; None if its version is `version` or there is none. Without a state, pass -1."""

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """Return the newest state once its version is at least `version_at_least`. Raises DeadlineExceeded."""


class StateFollower:
    """Gets each new state once, for an actor that holds no version of its own. One thread may use it."""

    def __init__(self, states: PolicyStates) -> None:
        self._states = states
        self.controller_version = -1
        """Version of the state that was received last, -1 before the first."""

    @property
    def trainer_version(self) -> int:
        """Version of the newest state, -1 before the first."""
        state = self._states.get_state()
        return -1 if state is None else state[0]

    def get_state(self) -> State | None:
        """Return the newest state if it was not received yet."""
        state = self._states.get_state(self.controller_version)
        if state is not None:
            self.controller_version = state[0]
        return state


class LocalStateManager:
    """A state manager within one process; any thread may update and get."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: State = (-1, {})

    def update_state(self, params: Tree) -> int:
        """Update the state as in PolicyStates. Raises RecordError if a name contains `/`."""
        flatten(params)
        copied = map_leaves(_read_only, params)
        with self._changed:
            self._state = (self._state[0] + 1, copied)
            self._changed.notify_all()
            return self._state[0]

    def get_state(self, version: int = -1) -> State | None:
        """See PolicyStates."""
        with self._changed:
            return None if self._state[0] in (version, -1) else self._state

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """See PolicyStates."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state[0] >= max(0, version_at_least), timeout_s):
                raise DeadlineExceeded(
                    f"version {version_at_least} did not appear within {timeout_s:g} s (newest: {self._state[0]}); "
                    "check that a process calls update_state"
                )
            return self._state


class StateManager(Closing):
    """A state manager over the topics `weights` and `policies` of a run, for processes that train, act, or do both.

    A process that updates is the learner `name` of the run, and its only publisher: an earlier publisher gets Fenced at
    its next update. A process that only gets states needs no permission to write. One thread may update; any thread may
    get.
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
        """Connect at the first use.

        `model` describes the parameters to readers of the manifest. `take_over` allows updates even if a learner of
        another name published last.
        """
        self._take_over = take_over
        self._kafka, self._run, self._name, self._model = kafka, run, name, model
        self._config = config or WeightsConfig()
        self._opening = threading.Lock()
        self._stack = ExitStack()
        self._writing: tuple[StepLog, WeightsPublisher] | None = None
        self._following: WeightsFollower | None = None

    def update_state(self, params: Tree) -> int:
        """See PolicyStates; returns once the version is committed. The first call fences the earlier publisher.

        Raises Fenced if another process took over, StateRefused if a learner of another name publishes, and
        DeliveryError or BrokerUnavailable if the version cannot be published; the version then does not exist, except
        perhaps after BrokerUnavailable, if the broker's answer to the commit was lost.
        """
        arrays = {path: np.array(leaf) for path, leaf in flatten(params).items()}
        log, publisher = self._writers()
        # Each update counts as a step. Learners that count their steps themselves do not use this class.
        manifest = publisher.stage(publisher.latest_version + 1, arrays)
        log.commit([publisher.record(manifest)])
        publisher.committed(manifest)
        return manifest.version

    def get_state(self, version: int = -1) -> State | None:
        """See PolicyStates; the first call starts the follower. Raises the error that ended the follower, if any."""
        state = self._follower().get_state(version)
        return None if state is None else (state[0], nest(state[1]))

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """See PolicyStates. Also raises the error that ended the follower, if any."""
        version, arrays = self._follower().wait_for(max(0, version_at_least), timeout_s)
        return version, nest(arrays)

    def close(self) -> None:
        """Stop the follower, and wait until the broker has everything published."""
        with self._opening:
            self._stack.close()

    def _writers(self) -> tuple[StepLog, WeightsPublisher]:
        with self._opening:
            if self._writing is None:
                # The log must be built first, because building it fences the earlier publisher.
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
