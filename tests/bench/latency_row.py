"""Rows `latency-100`, `latency-1000`: time from the acknowledgement of a batch's last rollout to the readable batch.

The baseline is the same time for a transactional copy of each rollout. On both sides another process groups or copies
100 or 1000 rollouts a second. This process produces them and follows the output, so its clock is the only one.
"""

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from types import TracebackType
from typing import NamedTuple, Self

from confluent_kafka import KafkaError, Message

from rollstream.consumers.batch_reader import BatchReader
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.hanging_transactions import open_on
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.records import TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from tests.bench import material
from tests.bench.measure import LatencyRow, Settings, ready_child
from tests.bench.runs import prepared

_BATCH_ROLLOUTS = 32
_WARM_UP = 0.2
"""Share of the rollouts whose latencies do not count: connections, first use, a group that has yet to form."""
_STILL_S = 60.0
"""How long nothing may be acknowledged, and nothing become readable, before the row has failed."""
_SECONDS = 15
"""How long a repetition produces at most."""


class Measured(NamedTuple):
    """One side of a repetition."""

    latencies_s: tuple[float, ...]
    rate: float
    """Rollouts acknowledged a second, from the first to the last."""


def row(name: str, rate: int) -> Callable[[Settings], LatencyRow]:
    """The row at `rate` rollouts a second."""

    def measure(settings: Settings) -> LatencyRow:
        rollouts = min(settings.rollouts, rate * _SECONDS)
        settings = replace(settings, rollouts=rollouts - rollouts % settings.group_size)
        ours: list[Measured] = []
        raw: list[Measured] = []
        for repetition in range(settings.repetitions):
            # Each in a run of its own, so that nothing is measured on a backlog.
            for side in (_grouped, _copied) if repetition % 2 == 0 else (_copied, _grouped):
                (ours if side is _grouped else raw).append(side(settings, rate, repetition))
        return LatencyRow(
            name=name,
            what=f"last rollout of a batch acknowledged to the batch readable, at {rate} rollouts/s, groups of "
            f"{settings.group_size}, batches of {_BATCH_ROLLOUTS}",
            baseline="a rollout acknowledged to its transactional copy readable, made at intervals, same clients",
            ours=tuple(measured.latencies_s for measured in ours),
            raw=tuple(measured.latencies_s for measured in raw),
            # A rate below the requested one shows that the machine was overloaded and a backlog was measured.
            figures={
                "rollouts/s": median(measured.rate for measured in ours),
                "raw rollouts/s": median(measured.rate for measured in raw),
            },
        )

    return measure


def _grouped(settings: Settings, rate: int, seed: int) -> Measured:
    with (
        prepared(settings, "latency", GroupingConfig(batch_rollouts=_BATCH_ROLLOUTS)) as run,
        BatchReader(settings.kafka, run) as reader,
        ready_child("grouping_process", settings, run) as child,
        Production(settings, run, rate, seed) as production,
    ):
        readable: list[tuple[TrainingBatch, float]] = []
        # The last rollouts of a partition may not fill a batch.
        enough = settings.rollouts - settings.partitions * (_BATCH_ROLLOUTS + settings.group_size)
        watch = Watch(production, child, topic_name(run, "batches"), enough)
        while watch.waits(sum(len(batch) for batch, _ in readable)):
            if (read := reader.poll(0.1)) is not None:
                readable.append((read.batch, time.perf_counter()))
    latencies = [
        at - max(production.acknowledged[batch.partition, offset] for offset in batch.source_offsets.tolist())
        for batch, at in readable
    ]
    return Measured(tuple(latencies[int(len(latencies) * _WARM_UP) :]), production.rate)


def _copied(settings: Settings, rate: int, seed: int) -> Measured:
    seen: list[tuple[tuple[int, int], float]] = []
    # A copy does not name its source, but each partition is copied in order, from its first record on.
    copies = [0] * settings.partitions
    with prepared(settings, "latency", GroupingConfig()) as run, ready_child("copy_loop", settings, run) as child:
        topic = topic_name(run, "evals")
        with Reader(settings.kafka) as reader, Production(settings, run, rate, seed) as production:
            reader.assign({(topic, partition): BEGINNING for partition in range(settings.partitions)})
            watch = Watch(production, child, topic, settings.rollouts + settings.partitions)
            while watch.waits(sum(copies)):
                for record in reader.poll(500, 0.1).records:
                    partition = record.partition
                    seen.append(((partition, copies[partition]), time.perf_counter()))
                    copies[partition] += 1
    latencies = [at - production.acknowledged[uid] for uid, at in seen if uid in production.acknowledged]
    return Measured(tuple(latencies[int(len(latencies) * _WARM_UP) :]), production.rate)


class Production:
    """Produces rollouts in its block, from a thread, at a steady rate or as fast as the broker takes them."""

    def __init__(self, settings: Settings, run: str, rate: int, seed: int) -> None:
        self.acknowledged: dict[tuple[int, int], float] = {}
        """When each offset of each partition was acknowledged; complete once the block is left."""
        self.failed: list[str] = []
        self.settings = settings
        self._topic, self._every_s = topic_name(run, "rollouts"), 1 / rate
        self._records = material.encoded(settings, seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-producer")

    @property
    def wanted(self) -> int:
        """Number of rollouts to produce."""
        return len(self._records)

    @property
    def rate(self) -> float:
        """Rollouts acknowledged a second."""
        times = self.acknowledged.values()
        return len(times) / (max(times) - min(times)) if len(times) > 1 else 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._stopping.set()
        self._thread.join()
        if error is None and (self.failed or len(self.acknowledged) != self.wanted):
            raise RuntimeError(f"{self.wanted - len(self.acknowledged)} records were not delivered: {self.failed[:1]}")

    def _run(self) -> None:
        try:
            self._produce()
        except Exception as error:
            self.failed.append(repr(error))

    def _produce(self) -> None:
        kafka = self.settings.kafka
        producer = clients.producer(kafka, **{"linger.ms": "1"})
        topic_admin.partitions_of(kafka, self._topic)
        began = time.perf_counter()
        for i, (key, value) in enumerate(self._records):
            while (ahead_s := began + i * self._every_s - time.perf_counter()) > 0 and not self._stopping.is_set():
                producer.poll(ahead_s)
            while not self._stopping.is_set():
                try:
                    producer.produce(self._topic, value, key, on_delivery=self._delivered)
                    break
                except BufferError:
                    # The broker is slower than the rate; what it takes now makes room.
                    producer.poll(0.1)
            producer.poll(0)
        producer.flush(0 if self._stopping.is_set() else _STILL_S)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(error.str())
        else:
            self.acknowledged[message.partition() or 0, message.offset() or 0] = time.perf_counter()


class Watch:
    """Decides whether to wait further: yes while a measurement makes progress, however slow a busy machine is."""

    def __init__(
        self,
        production: Production,
        child: "subprocess.Popen[str]",
        topic: str,
        enough: int,
        still_s: float = _STILL_S,
    ) -> None:
        """`child` is the process that is measured, `topic` its output topic, and `enough` the number of records that
        must become readable."""
        self._production, self._child, self._topic = production, child, topic
        self._enough, self._still_s = enough, still_s
        self._seen = (0, 0)
        self._since = self._readable_at = time.perf_counter()

    def waits(self, readable: int) -> bool:
        """Whether fewer than enough are readable. Raises RuntimeError with what was measured if no more will come."""
        seen, now = (readable, len(self._production.acknowledged)), time.perf_counter()
        if readable > self._seen[0]:
            self._readable_at = now
        if seen != self._seen:
            self._seen, self._since = seen, now
        if readable >= self._enough:
            return False
        if self._production.failed:
            raise RuntimeError(f"a rollout could not be produced: {self._production.failed[0]}; {self._measured(now)}")
        if self._child.poll() not in (None, 0):
            raise RuntimeError(f"the measured process exited with {self._child.returncode}; {self._measured(now)}")
        if now - self._since > self._still_s:
            settings = self._production.settings
            standing = open_on(settings.kafka, self._topic, list(range(settings.partitions)))
            raise RuntimeError(
                f"for {self._still_s:g} s nothing was acknowledged and nothing became readable; {self._measured(now)}; "
                f"in {self._topic} {standing}"
            )
        return True

    def _measured(self, now: float) -> str:
        readable, acknowledged = self._seen
        since_s = now - max(self._production.acknowledged.values(), default=now)
        return (
            f"{acknowledged} of {self._production.wanted} rollouts were acknowledged, the last {since_s:.0f} s ago; "
            f"{readable} of {self._enough} became readable, the last {now - self._readable_at:.0f} s ago"
        )
