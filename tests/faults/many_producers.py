"""A load as of many environment workers: each writes whole groups in its own name, through a few real producers."""

import threading
import time
from types import TracebackType
from typing import Any, Self

from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.errors import RollstreamError
from rollstream.topics.records import RolloutMetadata
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


class ManyProducers:
    """Writes groups of four from a few threads until the `with` block ends.

    If the block ends without an error, asserts that no write failed, so all groups are whole and acknowledged.
    """

    def __init__(self, run: RealRun, *, workers: int, threads: int, rollouts_per_s: float) -> None:
        self._run, self._rate = run, rollouts_per_s / threads
        self._stop = threading.Event()
        self._failures: list[RollstreamError] = []
        self._written = [0] * threads
        self._threads = [
            threading.Thread(target=self._work, args=(number, range(number, workers, threads)), name=f"load-{number}")
            for number in range(threads)
        ]

    @property
    def written(self) -> int:
        """Rollouts that the brokers have."""
        return sum(self._written)

    def await_more(self, rollouts: int, timeout_s: float = 120.0) -> None:
        """Wait until the brokers have this many rollouts more than now."""
        wanted = self.written + rollouts
        eventually(
            lambda: self.written >= wanted or self._failures, timeout_s, f"{rollouts} more rollouts acknowledged"
        )
        assert self._failures == []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            assert self._failures == []

    def _work(self, number: int, workers: range) -> None:
        def count(_delivery: object) -> None:
            self._written[number] += 1

        try:
            # While a broker is away, records of the partitions that it leads wait, and a busy machine may elect another
            # leader only after minutes.
            patience: dict[str, Any] = {"send_timeout_s": 600.0, "delivery.timeout.ms": 900_000}
            with RolloutProducer(self._run.kafka, self._run.name, on_delivery=count, **patience) as producer:
                self._write(producer, workers)
                producer.flush(600.0)
        except RollstreamError as error:
            self._failures.append(error)

    def _write(self, producer: RolloutProducer, workers: range) -> None:
        began, sent, group = time.monotonic(), 0, 0
        while not self._stop.is_set():
            worker = workers[group % len(workers)]
            for member in range(4):
                producer.send(
                    rollout(
                        f"{worker}.{group}",
                        member,
                        environment=f"env-{worker}",
                        metadata=RolloutMetadata(worker_id=f"worker-{worker}"),
                    )
                )
                sent += 1
            group += 1
            # A pace, not a wait for something to happen.
            producer.poll(max(0.0, sent / self._rate - (time.monotonic() - began)))
