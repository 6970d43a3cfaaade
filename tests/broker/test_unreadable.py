"""Records that a client cannot decompress within its limit: each is returned as unreadable, at its own offset, and the
records after them are read."""

import numpy as np
import pytest
from confluent_kafka.admin import NewTopic

from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.catalogue import spec_of


@pytest.fixture
def kafka(broker: str, run_name: str) -> KafkaConfig:
    config = KafkaConfig(bootstrap_servers=broker)
    client = clients.admin(config)
    settings = spec_of("rollouts").settings(TopicsConfig(), config)
    client.create_topics([NewTopic(run_name, 1, 1, config=settings)])[run_name].result(300)
    return config


def send(kafka: KafkaConfig, topic: str, values: list[bytes], compression: str = "zstd") -> None:
    """Send one record batch, of some kilobytes on the wire however large it is when decompressed."""
    producer = clients.producer(
        kafka,
        **{
            "compression.type": compression,
            "linger.ms": "60000",  # flush does not wait for it
            "batch.size": 100_000_000,
            "message.max.bytes": 100_000_000,
            "queue.buffering.max.kbytes": 200_000,
        },
    )
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(120) == 0


def test_a_batch_that_cannot_be_read_is_as_many_records_as_it_has_and_no_more(
    kafka: KafkaConfig, run_name: str
) -> None:
    bomb = [bytes(4_000_000)] * 9
    send(kafka, run_name, [b"first"])
    send(kafka, run_name, bomb)
    send(kafka, run_name, [b"between"])
    send(kafka, run_name, [bytes(40_000_000)])
    send(kafka, run_name, bomb[:2])
    send(kafka, run_name, [b"last"])
    read = list(read_to_end(kafka, run_name))
    assert [message.offset for message in read] == list(range(15))
    values = [message.value for message in read]
    assert values == [b"first", *[None] * 9, b"between", None, *bomb[:2], b"last"]
    assert [message.timestamp_ms == -1 for message in read] == [value is None for value in values]
    assert all(message.key is None and message.headers == () for message in read if message.value is None)


@pytest.mark.parametrize("compression", ["gzip", "lz4", "snappy"])
def test_a_bomb_of_another_compression_is_as_unreadable_as_one_of_zstd(
    kafka: KafkaConfig, run_name: str, compression: str
) -> None:
    send(kafka, run_name, [b"first"], compression)
    send(kafka, run_name, [bytes(48_000_000)], compression)
    send(kafka, run_name, [b"last"], compression)
    values = [message.value for message in read_to_end(kafka, run_name)]
    assert [value and len(value) for value in values] == [5, None, 4]


def test_a_log_that_ends_with_what_cannot_be_read_ends(kafka: KafkaConfig, run_name: str) -> None:
    send(kafka, run_name, [b"first"])
    send(kafka, run_name, [bytes(40_000_000)])
    assert [message.value for message in read_to_end(kafka, run_name)] == [b"first", None]


def test_reading_from_the_middle_of_such_a_batch_begins_there(kafka: KafkaConfig, run_name: str) -> None:
    send(kafka, run_name, [bytes(4_000_000)] * 9)
    send(kafka, run_name, [b"last"])
    read = list(read_to_end(kafka, run_name, start=7))
    assert [(message.offset, message.value) for message in read] == [(7, None), (8, None), (9, b"last")]


def test_whatever_a_record_may_be_can_be_read_however_it_compresses(kafka: KafkaConfig, run_name: str) -> None:
    """The client triples its buffer until a record fits, so it is sure to read only a third of its limit."""
    noise = np.random.default_rng(0).bytes(6_200_000)
    values = [
        noise[:size] + bytes(7_500_000 - size) for size in (0, 350_000, 1_040_000, 2_000_000, 3_100_000, 6_200_000)
    ]
    send(kafka, run_name, values[:1])
    for value in values[1:]:
        send(kafka, run_name, [value])
    # Compare hashes, because pytest would show megabytes of a difference.
    assert [hash(message.value) for message in read_to_end(kafka, run_name)] == [hash(v) for v in values]
