"""The team of a learner's processes: the lead plans each step, and the other processes follow.

Messages go through JAX's coordination service, which the lead runs; a process that loses its team ends with TeamLost.
Arrays are exchanged within the step itself.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, RollstreamError

HEARTBEAT_TIMEOUT_S = 20
"""Time without a heartbeat after which a process, and with it the team, counts as lost."""
_JOIN_TIMEOUT_S = 120
_LEAVE_TIMEOUT_S = 10
_LISTEN_MS = 5_000
_LOST = ("Gloo", "coordination", "heartbeat", "UNAVAILABLE", "Connection")
"""Words in the errors of a computation that failed because another process was lost."""


class TeamLost(RollstreamError):
    """Another process of the learner is gone; all processes must start again from the checkpoint."""

    exit_code = 1


class Team(Protocol):
    """The processes that train together; process 0 leads."""

    process: int
    processes: int

    def publish(self, key: str, value: bytes) -> None:
        """Publish a value to the other processes, under a new key."""

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        """Wait for the value of a key. Raises TeamLost if the lead is gone, DeadlineExceeded after `timeout_s`."""

    def forget(self, key: str) -> None:
        """Delete a value that every process has read."""


class Alone:
    """A team of one process."""

    process = 0
    processes = 1

    def publish(self, key: str, value: bytes) -> None:
        """Do nothing."""

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        """Raise TeamLost: no other process publishes values."""
        raise TeamLost(f"a learner of one process has no other process that could publish {key}")

    def forget(self, key: str) -> None:
        """Do nothing."""


class JaxTeam:
    """A team over jax.distributed."""

    def __init__(self, process: int, processes: int) -> None:
        from jax._src import distributed  # The coordination service has no public API for host values.

        self.process, self.processes = process, processes
        self._client: Any = distributed.global_state.client

    def publish(self, key: str, value: bytes) -> None:
        """Publish a value to the other processes."""
        try:
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as error:
            raise TeamLost(f"process {self.process} of the learner cannot reach its lead: {error}") from error

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        """Wait for the value of a key, by default without a time limit. Raises TeamLost or DeadlineExceeded."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = _LISTEN_MS if deadline is None else math.ceil(1000 * (deadline - time.monotonic()))
            try:
                value: bytes = self._client.blocking_key_value_get_bytes(key, max(1, min(_LISTEN_MS, left_ms)))
                return value
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise TeamLost(f"process {self.process} of the learner lost its team: {error}") from error
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no {key} from the learner's other processes within {timeout_s:g} s")

    def forget(self, key: str) -> None:
        """Delete a value that every process has read."""
        self._client.key_value_delete(key)


def join(config: LearnerConfig, process: int) -> Team:
    """Join the other processes of the learner; call before anything else uses JAX.

    Raises ConfigurationError if `process` is not below `learner.processes`, or `learner.coordinator` is needed but not
    set, and TeamLost if other processes do not join.
    """
    if not 0 <= process < config.processes:
        raise ConfigurationError(
            f"--process is {process}, but learner.processes is {config.processes}; give a number from 0 to "
            f"{config.processes - 1}, or raise learner.processes"
        )
    if config.processes == 1:
        return Alone()
    if not config.coordinator:
        raise ConfigurationError(
            "learner.coordinator is not set; set it to the host:port of the lead, which all processes need "
            "(`rollstream run` chooses it if all processes are on this machine)"
        )
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            process,
            initialization_timeout=_JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=_LEAVE_TIMEOUT_S,
        )
    except (RuntimeError, ValueError) as error:
        raise TeamLost(
            f"process {process} of the learner did not find the other processes at {config.coordinator} within "
            f"{_JOIN_TIMEOUT_S} s: {error}; start all {config.processes} processes"
        ) from error
    return JaxTeam(process, config.processes)


def leave(team: Team) -> None:
    """Leave the team once all work is done; every process calls this, and waits for the other processes."""
    if team.processes > 1:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def raising_team_lost(team: Team) -> Iterator[None]:
    """Raise TeamLost instead of the errors that a joint computation raises when another process is lost."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if team.processes == 1 or not any(sign in str(error) for sign in _LOST):
            raise
        reason = str(error).partition("\n")[0]
        raise TeamLost(
            f"process {team.process} of the learner lost another process ({reason}); start all {team.processes} "
            "processes again: they resume from the checkpoint"
        ) from error
