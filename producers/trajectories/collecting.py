"""A collecting process: runs a user's player and writes the trajectories of its chunk steps until stopped.

Trajectories without rewards go to `unlabelled`, others to `trajectories`; the first step of a process decides.

A worker's trajectories of one environment are on one partition in the order they were sent, because an episode may span
several. An error names each trajectory that is invalid, too large or not delivered.
"""

import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from rollstream.producers.config import CollectConfig
from rollstream.producers.record_sender import RecordSender, RolloutDelivery
from rollstream.producers.trajectories.collector import ChunkStepResult, TrajectoryCollector
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.heartbeats import beat
from rollstream.topics.kafka import clients
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.secrets import resolve_options
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.trajectory_arrays import Trajectory, to_record


class TrajectoryProducer(RecordSender):
    """Sends trajectories of one run; `topic="unlabelled"` is for trajectories that wait for rewards.

    Pass `limit_bytes` to a TrajectoryCollector as max_bytes, so that its trajectories fit into records. Raises
    BrokerUnavailable or TopicError at once if there is no topic to write to.
    """

    too_large = "collect fewer steps, with a TrajectoryCollector's max_bytes, or run fewer environments side by side"
    not_delivered = "episodes of its worker may continue after the gap, so restart the worker: it begins new episodes"

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        topic: Literal["trajectories", "unlabelled"] = "trajectories",
        on_delivery: Callable[[RolloutDelivery], None] | None = None,
        send_timeout_s: float = 30.0,
        **overrides: Any,
    ) -> None:
        """`on_delivery` is called for each acknowledged trajectory; `overrides` are librdkafka keys."""
        super().__init__(kafka, topic_name(run, topic), send_timeout_s=send_timeout_s, **overrides)
        self._on_delivery = on_delivery

    def send(self, trajectory: Trajectory, *, timeout_s: float | None = None) -> None:
        """Queue a trajectory; it is written in the background and acknowledged in `poll` or `flush`.

        Raises RecordError if it is invalid or names no worker, RecordTooLarge beyond the record limit,
        DeadlineExceeded if the queue stays full for `timeout_s` (default: send_timeout_s), DeliveryError if an
        earlier trajectory was not delivered. In each of these cases this trajectory was not sent.
        """
        worker_id = trajectory.metadata.worker_id
        if not worker_id:
            raise RecordError(
                f"trajectory {trajectory.uid!r} names no worker (metadata.worker_id), which determines its partition; "
                "a TrajectoryCollector sets it"
            )

        def delivered(partition: int, offset: int) -> None:
            if self._on_delivery:
                self._on_delivery(RolloutDelivery(trajectory.uid, partition, offset))

        key = encode_key(trajectory.environment, worker_id)
        self._send(f"trajectory {trajectory.uid}", key, to_record(trajectory), timeout_s, delivered)


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
