"""The level at which producers compress, by the bytes that they send."""

import json
import random
from dataclasses import replace

from confluent_kafka.admin import NewTopic

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from tests.support.waiting import eventually

SEED = 7


def sent_bytes(kafka: KafkaConfig, topic: str, values: list[bytes]) -> int:
    """Bytes that a producer sends for these values, as librdkafka counts them when it ends."""
    counted: list[int] = []
    producer = clients.producer(
        kafka,
        **{
            "linger.ms": "60000",  # flush does not wait for it
            "statistics.interval.ms": 50,
            "stats_cb": lambda text: counted.append(total(text)),
        },
    )
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(120) == 0
    before = len(counted)

    def last_count() -> int:
        producer.poll(0.05)
        # The first statistics after the flush may have been counted before it.
        return len(counted) > before + 1 and counted[-1]

    return eventually(last_count, 60, "statistics after the flush")


def total(text: str) -> int:
    return sum(broker["txbytes"] for broker in json.loads(text)["brokers"].values())


def test_producers_compress_at_the_level_that_is_set(broker: str, run_name: str) -> None:
    generator = random.Random(SEED)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(3, 9))) for _ in range(4000)]
    values = [" ".join(generator.choices(words, k=4000)).encode() for _ in range(40)]
    kafka = KafkaConfig(bootstrap_servers=broker)
    client = clients.admin(kafka)
    client.create_topics([NewTopic(run_name, 1, 1)])[run_name].result(300)
    sizes = {level: sent_bytes(replace(kafka, compression_level=level), run_name, values) for level in (1, 2, 3)}
    plain = sent_bytes(replace(kafka, compression="none"), run_name, values)
    assert sizes[3] < 0.95 * sizes[1] < sizes[1] < plain, f"seed {SEED}: {sizes}, {plain} without compression"
    assert sizes[2] < 0.95 * sizes[1], f"seed {SEED}: {sizes}"
    assert abs(sent_bytes(kafka, run_name, values) - sizes[2]) < 0.01 * sizes[2]
