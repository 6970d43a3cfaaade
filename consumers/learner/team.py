"""Several processes of one learner: the lead says what each step is made of, the others follow it.

What they tell each other goes through JAX's coordination service, which the lead runs; a process whose team is gone
ends with TeamLost. Arrays go through the step itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from consumers.learner.config import LearnerConfig
from topics.errors import ConfigurationError, RollstreamError

HEARTBEAT_TIMEOUT_S = 20
"""A process that has not been heard of for so long is gone, and its team with it."""
_JOIN_TIMEOUT_S = 120
_LEAVE_TIMEOUT_S = 10
_LISTEN_MS = 5_000
_LOST = ("Gloo", "coordination", "heartbeat", "UNAVAILABLE", "Connection")
"""What errors of a computation say when another process has gone, not when the computation is wrong."""


class TeamLost(RollstreamError):
    """Another process of the learner is gone; all start again from the checkpoint."""

    exit_code = 1


class Team(Protocol):
    """The processes that train together. Number 0 leads."""

    process: int
    processes: int

    def tell(self, key: str, value: bytes) -> None:
        """Let the others hear a value, once, under a key that was not used before."""

    def hear(self, key: str) -> bytes:
        """Wait for what was told under a key. Raises TeamLost when nothing can come any more."""

    def forget(self, key: str) -> None:
        """Drop a value everybody heard."""


class Alone:
    """A team of one, which has nobody to tell anything."""

    process = 0
    processes = 1

    def tell(self, key: str, value: bytes) -> None:
        """Nobody listens."""

    def hear(self, key: str) -> bytes:
        """There is nobody to hear of."""
        raise TeamLost(f"nobody tells {key} to a learner of one process")

    def forget(self, key: str) -> None:
        """There is nothing to drop."""


class JaxTeam:
    """A team over jax.distributed."""

    def __init__(self, process: int, processes: int) -> None:
        from jax._src import distributed  # The coordination service has no public door for values of hosts.

        self.process, self.processes = process, processes
        self._client: Any = distributed.global_state.client

    def tell(self, key: str, value: bytes) -> None:
        """Let the others hear a value."""
        try:
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as error:
            raise TeamLost(f"process {self.process} of the learner cannot reach its lead: {error}") from error

    def hear(self, key: str) -> bytes:
        """Wait for what was told, however long nothing happens."""
        while True:
            try:
                value: bytes = self._client.blocking_key_value_get_bytes(key, _LISTEN_MS)
                return value
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise TeamLost(f"process {self.process} of the learner lost its lead: {error}") from error

    def forget(self, key: str) -> None:
        """Drop a value everybody heard."""
        self._client.key_value_delete(key)


def join(config: LearnerConfig, process: int) -> Team:
    """Find the other processes of the learner; call before anything else uses JAX.

    Raises ConfigurationError for a number that is none of `learner.processes`, TeamLost when the others do not come.
    """
    if not 0 <= process < config.processes:
        raise ConfigurationError(
            f"--process {process} of learner.processes {config.processes}: give a number from 0 to "
            f"{config.processes - 1}, or raise learner.processes"
        )
    if config.processes == 1:
        return Alone()
    if not config.coordinator:
        raise ConfigurationError(
            "learner.coordinator is not set: several processes of a learner need host:port of the lead "
            "(`rollstream run` chooses one where all are on this machine)"
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
            f"process {process} of the learner did not find the others at {config.coordinator} within "
            f"{_JOIN_TIMEOUT_S} s: {error}; start all {config.processes} of them"
        ) from error
    return JaxTeam(process, config.processes)


@contextmanager
def in_company(team: Team) -> Iterator[None]:
    """What a computation of several processes raises when one is gone becomes TeamLost."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if team.processes == 1 or not any(sign in str(error) for sign in _LOST):
            raise
        reason = str(error).partition("\n")[0]
        raise TeamLost(
            f"process {team.process} of the learner lost another one ({reason}); start all {team.processes} again: "
            "they go on from the checkpoint"
        ) from error


def host_copies(params: Mapping[str, jax.Array]) -> dict[str, np.ndarray[Any, Any]]:
    """Whole arrays in the memory of every process, however they are split; all processes must call it together."""
    whole = {
        name: value if value.is_fully_addressable else multihost_utils.process_allgather(value, tiled=True)
        for name, value in params.items()
    }
    return {name: np.array(value) for name, value in whole.items()}
