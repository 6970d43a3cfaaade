"""Baseline of `produce`: bytes encoded beforehand, through the same producer settings, to the same topic."""

from collections.abc import Sequence

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, topic_admin
from tests.bench.measure import Stopwatch, Timing


def measure(kafka: KafkaConfig, topic: str, records: Sequence[tuple[bytes, bytes]]) -> Timing:
    """Produce keys and values and wait until the broker has them all. Raises RuntimeError when it does not."""
    producer = clients.producer(kafka)
    topic_admin.partitions_of(kafka, topic)
    watch = Stopwatch()
    for key, value in records:
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    waiting = producer.flush(120)
    if waiting:
        raise RuntimeError(f"{waiting} records were not acknowledged")
    return watch.timing(len(records))
