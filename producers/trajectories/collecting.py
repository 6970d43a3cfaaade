"""A collecting process: plays what its user's player yields, and writes the trajectories until it is told to stop.

Trajectories without rewards go to `unlabelled`, others to `trajectories`; the first step of a process decides.
"""

import itertools
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from producers.config import CollectConfig
from producers.trajectories.collector import TrajectoryCollector
from producers.trajectories.producer import TrajectoryProducer
from producers.trajectories.steps import ChunkStepResult
from topics import clients
from topics.config import KafkaConfig
from topics.errors import ConfigurationError

_IDLE_S = 0.005
"""Pause after a player has yielded None."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a player is told about the process it plays in."""

    kafka: KafkaConfig
    """Brokers of the run, e.g. for a StateManager that follows the weights."""
    run: str
    ordinal: int
    """Number of this process, from 0."""
    seed: int
    """`collect.seed`, the same in all processes."""
    steps: int
    """`collect.steps`: chunk steps of a trajectory."""
    options: Mapping[str, str]
    """`collect.options`."""


Player = Callable[[Seat], Generator[ChunkStepResult | None]]
"""Yields the chunk steps it plays, or None while it has to wait, e.g. for weights. Collecting ends when it returns."""


def topic_of(step: ChunkStepResult) -> Literal["unlabelled", "trajectories"]:
    """Where trajectories of such steps go: those without rewards wait for a labeler."""
    return "unlabelled" if step.rewards is None else "trajectories"


def run_collecting(
    player: Player,
    kafka: KafkaConfig,
    run: str,
    config: CollectConfig,
    *,
    ordinal: int,
    stop: threading.Event,
    on_ready: Callable[[], None],
) -> int:
    """Collect until the player returns, `config.trajectories` are sent or `stop` is set; returns how many were sent.

    Raises BrokerUnavailable and TopicError where there is nothing to write to, ConfigurationError for a player that is
    no generator function, RecordError for a step that is unsound, and what the player raises.
    """
    clients.check_broker(kafka)
    seat = Seat(kafka=kafka, run=run, ordinal=ordinal, seed=config.seed, steps=config.steps, options=config.options)
    steps = player(seat)
    if not isinstance(steps, Generator):
        raise ConfigurationError(
            f"collect.player {config.player!r} returned {type(steps).__name__}; a player is a generator function, "
            "which yields chunk steps"
        )
    with closing(steps):
        on_ready()
        first = next((step for step in steps if step is not None or stop.wait(_IDLE_S)), None)
        if first is None:
            return 0
        with TrajectoryProducer(kafka, run, topic=topic_of(first)) as producer:
            collector = TrajectoryCollector(
                config.environment,
                len(first.actions),
                worker_id=f"collect-{ordinal}",
                steps=config.steps,
                max_bytes=producer.limit_bytes,
                max_episode_length=config.max_episode_length,
            )
            sent = 0
            for step in itertools.chain([first], steps):
                if step is None:
                    producer.poll()
                    stop.wait(_IDLE_S)
                elif (trajectory := collector.add(step)) is not None:
                    producer.send(trajectory)
                    sent += 1
                if stop.is_set() or sent == config.trajectories > 0:
                    break
            if (rest := collector.finish()) is not None:
                producer.send(rest)
                sent += 1
    return sent
