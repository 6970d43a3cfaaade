"""Records that a client cannot decompress within its limit: each is returned as unreadable, at its own offset, and the
records after them are read."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka.admin import NewTopic

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.catalogue import spec_of
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled


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


def test_bombs_of_every_compression_are_unreadable_from_their_middle_on_and_at_the_end_of_a_log(
    kafka: KafkaConfig, run_name: str
) -> None:
    for compression in ("gzip", "lz4", "snappy"):
        send(kafka, run_name, [b"first"], compression)
        send(kafka, run_name, [bytes(48_000_000)], compression)
    assert [message.value for message in read_to_end(kafka, run_name)] == [b"first", None] * 3
    send(kafka, run_name, [bytes(4_000_000)] * 9)
    send(kafka, run_name, [b"last"])
    read = list(read_to_end(kafka, run_name, start=13))
    assert [(message.offset, message.value) for message in read] == [(13, None), (14, None), (15, b"last")]


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


@pytest.mark.parametrize("compression", ["gzip", pytest.param("lz4", marks=pytest.mark.long)])
def test_a_bomb_is_a_dead_letter_and_costs_grouping_no_more_memory_than_a_client_may_take(
    real_run: RealRun, compression: str
) -> None:
    real_run.topics, real_run.grouping = (
        TopicsConfig(partitions=1),
        GroupingConfig(batch_rollouts=4, max_batch_age_s=2.0),
    )
    run = real_run.prepare()
    process = run.start("group")
    run.send(rollout("before", member) for member in range(4))
    settled(run, batched=4)
    before = peak_bytes(process)
    producer = clients.producer(
        run.kafka,
        **{"compression.type": compression, "message.max.bytes": 100_000_000, "queue.buffering.max.kbytes": 200_000},
    )
    for _ in range(3):
        producer.produce(run.topic("rollouts"), bytes(96_000_000), partition=0)
        assert producer.flush(120) == 0
    run.send(rollout("behind", member) for member in range(4))
    book = settled(run, batched=8)
    assert book.dead_lettered == 3
    assert book.problems == []
    assert '"event": "record_unreadable"' in run.log_of(process)
    assert peak_bytes(process) - before < 64_000_000


def peak_bytes(process: "subprocess.Popen[bytes]") -> int:
    """Peak memory of a process so far."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
