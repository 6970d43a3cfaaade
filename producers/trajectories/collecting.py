"""A collecting process: runs a user's player and writes the trajectories of its chunk steps until stopped.

Trajectories without rewards go to `unlabelled`, others to `trajectories`; the first step of a process decides.
"""

import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from rollstream.producers.config import CollectConfig
from rollstream.producers.trajectories.collector import TrajectoryCollector
from rollstream.producers.trajectories.producer import TrajectoryProducer
from rollstream.producers.trajectories.steps import ChunkStepResult
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.heartbeats import beat
from rollstream.topics.kafka import clients
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.secrets import resolve_options

_IDLE_S = 0.005
"""Pause after a player yields None."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Data for a player about its process."""

    kafka: KafkaConfig
    """Connection to the run's brokers, e.g. for a StateManager that follows the weights."""
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
    """Return the topic for trajectories of a step's kind; trajectories without rewards wait for a labeler."""
    return "unlabelled" if step.rewards is None else "trajectories"


def _beating(steps: Iterable[ChunkStepResult | None]) -> Iterator[ChunkStepResult | None]:
    for step in steps:
        beat("playing")
        if step is not None:
            VALUES.count("rollstream_collecting_steps_total")
        yield step


def run_collecting(
    player: Player,
    kafka: KafkaConfig,
    run: str,
    config: CollectConfig,
    *,
    ordinal: int,
    stop: threading.Event,
    on_ready: Callable[[], None],
) -> bool:
    """Collect until the player returns, `config.trajectories` are sent or `stop` is set; return false in the last case.

    Raises BrokerUnavailable or TopicError if there is no topic to write to, ConfigurationError if the player is not a
    generator function, RecordError for an invalid step, and the player's own errors.
    """
    clients.check_broker(kafka)
    options = resolve_options("collect.options", config.options)
    seat = Seat(kafka=kafka, run=run, ordinal=ordinal, seed=config.seed, steps=config.steps, options=options)
    steps = player(seat)
    if not isinstance(steps, Generator):
        raise ConfigurationError(
            f"collect.player {config.player!r} returned {type(steps).__name__}; a player is a generator function, "
            "which yields chunk steps"
        )
    for name in ("steps", "trajectories"):
        VALUES.count(f"rollstream_collecting_{name}_total", 0)
    with closing(steps):
        on_ready()
        first = next((step for step in _beating(steps) if step is not None or stop.wait(_IDLE_S)), None)
        if first is None:
            return not stop.is_set()
        with TrajectoryProducer(kafka, run, topic=topic_of(first)) as producer:
            collector = TrajectoryCollector(
                config.environment,
                len(first.actions),
                worker_id=f"collect-{ordinal}",
                steps=config.steps,
                max_bytes=producer.limit_bytes,
                max_episode_length=config.max_episode_length,
            )
            sent, done = 0, True
            for step in itertools.chain([first], _beating(steps)):
                if step is None:
                    producer.poll()
                    stop.wait(_IDLE_S)
                elif (trajectory := collector.add(step)) is not None:
                    producer.send(trajectory)
                    VALUES.count("rollstream_collecting_trajectories_total")
                    sent += 1
                if sent == config.trajectories > 0:
                    break
                if stop.is_set():
                    done = False
                    break
            if (rest := collector.finish()) is not None:
                producer.send(rest)
    return done
