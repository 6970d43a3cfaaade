"""A load of rollouts for demonstrations: real records, written by real producers, whose rate rises and falls.

Tokens, rewards and which groups lack a member are drawn from the seed; only the rate decides when a rollout is written.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import numpy as np

from rollstream.pipeline.config import ScaleDemoConfig
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.records import Rollout, RolloutMetadata

GROUP_SIZE = 4
_INCOMPLETE = 0.005
"""Share of groups whose last member is never written, as if its worker had died."""
_TURN_S = 0.02
_ENVIRONMENTS = 4
_VOCABULARY = 32_000


def rate_at(load: ScaleDemoConfig, seconds: float) -> float:
    """Return the rate, in rollouts per second, `seconds` after the beginning."""
    rising = (seconds - load.low_s) / load.ramp_s
    falling = (load.low_s + 2 * load.ramp_s + load.high_s - seconds) / load.ramp_s
    share = min(max(min(rising, falling), 0.0), 1.0)
    return load.low_per_s + share * (load.high_per_s - load.low_per_s)


def duration_s(load: ScaleDemoConfig) -> float:
    """Return how long it takes until the rate is low again."""
    return load.low_s + 2 * load.ramp_s + load.high_s


def rollouts(load: ScaleDemoConfig, seed: int) -> Iterator[Rollout]:
    """Yield the rollouts of the load without end, one group from each worker in turn."""
    rng = np.random.default_rng(seed)
    number = 0
    while True:
        worker = number % load.workers
        members = GROUP_SIZE - int(rng.random() < _INCOMPLETE)
        for member in range(members):
            yield _rollout(rng, load.tokens, worker, number // load.workers, member)
        number += 1


def _rollout(rng: np.random.Generator, tokens: int, worker: int, group: int, member: int) -> Rollout:
    mask = np.arange(tokens) >= max(1, tokens // 8)
    example = f"{worker}.{group}"
    return Rollout(
        uid=f"synthetic-{example}.{member}",
        group_id=example,
        group_size=GROUP_SIZE,
        environment=f"synthetic-{worker % _ENVIRONMENTS}",
        example_id=example,
        policy_version=0,
        lowest_version=0,
        highest_version=0,
        tokens=rng.integers(0, _VOCABULARY, tokens).astype("<i4"),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(1.0, tokens), 0.0).astype("<f4"),
        reward=float(rng.integers(0, 2)),
        metadata=RolloutMetadata(worker_id=f"synthetic-{worker}", replica_id="synthetic", timestamp=time.time()),
    )


class SyntheticWorkers:
    """Writes the load from a separate thread, from `__enter__` until `stop`."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        load: ScaleDemoConfig,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kafka, self._run, self._load, self._clock = kafka, run, load, clock
        self._records = rollouts(load, seed)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="synthetic-workers", daemon=True)
        self._failure: RollstreamError | None = None
        self.written = 0
        """Rollouts that the broker has acknowledged."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()

    def check(self) -> None:
        """Raise the error that ended the load, if there is one."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> int:
        """Stop, wait until the broker has all rollouts, and return how many were written. Raises as `check` does."""
        self._ending.set()
        self._thread.join()
        self.check()
        return self.written

    def _work(self) -> None:
        try:
            with RolloutProducer(self._kafka, self._run, on_delivery=lambda _delivery: self._count()) as producer:
                self._write(producer)
                producer.flush()
        except RollstreamError as error:
            self._failure = error

    def _count(self) -> None:
        self.written += 1

    def _write(self, producer: RolloutProducer) -> None:
        began = before = self._clock()
        due = 0.0
        sent = 0
        while not self._ending.wait(_TURN_S):
            now = self._clock()
            due += rate_at(self._load, (now + before) / 2 - began) * (now - before)
            before = now
            while sent < math.floor(due):
                producer.send(next(self._records))
                sent += 1
            producer.poll()
