"""Rows `latency-100`, `latency-1000`: from the last rollout of a batch acknowledged to the batch readable.

Beside it the same for a transactional copy of each rollout. Both at that many rollouts a second, through a process of
their own, read by a reader that follows; this process produces and reads, and its clock is the only one.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message, TopicPartition

from consumers.batch_reader import BatchReader
from consumers.grouping.config import GroupingConfig
from tests.bench import material
from tests.bench.measure import LatencyRow, Settings, ready_child
from tests.bench.runs import prepared
from topics import clients
from topics.catalogue import topic_name
from topics.records import TrainingBatch

_BATCH_ROLLOUTS = 32
_WARM_UP = 0.2
"""Share of the rollouts whose latencies do not count: connections, first use, a group that has yet to form."""
_SPARE_S = 60.0
_SECONDS = 15
"""How long a repetition produces at most."""


def row(name: str, rate: int) -> Callable[[Settings], LatencyRow]:
    """The row at `rate` rollouts a second."""

    def measure(settings: Settings) -> LatencyRow:
        rollouts = min(settings.rollouts, rate * _SECONDS)
        settings = replace(settings, rollouts=rollouts - rollouts % settings.group_size)
        ours: list[tuple[float, ...]] = []
        raw: list[tuple[float, ...]] = []
        for repetition in range(settings.repetitions):
            # Each in a run of its own, so that nothing is measured on a backlog.
            for side in (_grouped, _copied) if repetition % 2 == 0 else (_copied, _grouped):
                (ours if side is _grouped else raw).append(side(settings, rate, repetition))
        return LatencyRow(
            name=name,
            what=f"last rollout of a batch acknowledged to the batch readable, at {rate} rollouts/s, groups of "
            f"{settings.group_size}, batches of {_BATCH_ROLLOUTS}",
            baseline="a rollout acknowledged to its transactional copy readable, same cadence and clients",
            ours=tuple(ours),
            raw=tuple(raw),
        )

    return measure


def _grouped(settings: Settings, rate: int, seed: int) -> tuple[float, ...]:
    with (
        prepared(settings, "latency", GroupingConfig(batch_rollouts=_BATCH_ROLLOUTS)) as run,
        BatchReader(settings.kafka, run, check_digests=False) as reader,
        ready_child("grouping_process", settings, run),
    ):
        readable: list[tuple[TrainingBatch, float]] = []
        # What is left at the end does not fill a batch.
        enough = settings.rollouts - settings.partitions * (_BATCH_ROLLOUTS + settings.group_size)
        with _producing(settings, run, rate, seed) as acknowledged:
            for _ in _until(lambda: sum(len(batch) for batch, _ in readable) >= enough, settings.rollouts / rate):
                if (read := reader.poll(0.1)) is not None:
                    readable.append((read.batch, time.perf_counter()))
    latencies = [
        at - max(acknowledged[batch.partition, offset] for offset in batch.source_offsets.tolist())
        for batch, at in readable
    ]
    return tuple(latencies[int(len(latencies) * _WARM_UP) :])


def _copied(settings: Settings, rate: int, seed: int) -> tuple[float, ...]:
    seen: list[tuple[tuple[int, int], float]] = []
    # A copy does not say of which record it is; each partition is copied in order, from its first record on.
    copies = [0] * settings.partitions
    with prepared(settings, "latency", GroupingConfig()) as run, ready_child("copy_loop", settings, run):
        topic = topic_name(run, "evals")
        consumer = clients.reader(settings.kafka)
        begin = [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(settings.partitions)]
        clients.follow(consumer, settings.kafka, begin)
        with _producing(settings, run, rate, seed) as acknowledged:
            for _ in _until(lambda: sum(copies) >= settings.rollouts + settings.partitions, settings.rollouts / rate):
                for message in clients.at_hand(consumer, 500, 0.1):
                    if message.error() is None:
                        partition = message.partition() or 0
                        seen.append(((partition, copies[partition]), time.perf_counter()))
                        copies[partition] += 1
        consumer.close()
    latencies = [at - acknowledged[of] for of, at in seen if of in acknowledged]
    return tuple(latencies[int(len(latencies) * _WARM_UP) :])


def _until(done: Callable[[], bool], seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds + _SPARE_S
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all was readable {_SPARE_S:g} s after it was produced")
        yield


@contextmanager
def _producing(settings: Settings, run: str, rate: int, seed: int) -> Iterator[dict[tuple[int, int], float]]:
    """Produce from a thread at a steady rate; gives when each offset of each partition was acknowledged.

    Complete once the block is left; raises there when a record was not delivered.
    """
    records = material.encoded(settings, seed)
    acknowledged: dict[tuple[int, int], float] = {}
    failed: list[str] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failed.append(error.str())
        else:
            acknowledged[message.partition() or 0, message.offset() or 0] = time.perf_counter()

    def produce() -> None:
        producer = clients.producer(settings.kafka, **{"linger.ms": "1"})
        topic = topic_name(run, "rollouts")
        clients.partitions_of(settings.kafka, topic)
        began = time.perf_counter()
        for i, (key, value) in enumerate(records):
            while (ahead_s := began + i / rate - time.perf_counter()) > 0:
                producer.poll(ahead_s)
            producer.produce(topic, value, key, on_delivery=delivered)
            producer.poll(0)
        producer.flush(_SPARE_S)

    thread = threading.Thread(target=produce, name="bench-producer")
    thread.start()
    try:
        yield acknowledged
    finally:
        thread.join()
    if failed or len(acknowledged) != len(records):
        raise RuntimeError(f"{len(records) - len(acknowledged)} records were not delivered: {failed[:1]}")
