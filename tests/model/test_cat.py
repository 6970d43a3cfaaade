"""The last records of a topic are records, whatever else takes up offsets: ends of transactions, and aborted ones."""

import pytest
from confluent_kafka.admin import NewTopic

from rollstream.pipeline.tools.cat import ReadSpan, messages
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.open_transactions import await_decided


@pytest.fixture(scope="module")
def topic(broker: str) -> str:
    """Partition 0 has 30 transactions of one record, 60 aborted records and one record more, 1 has a record, 2 none."""
    kafka, name = KafkaConfig(bootstrap_servers=broker), "cat-last"
    client = clients.admin(kafka)
    client.create_topics([NewTopic(name, 3, 1)])[name].result(300)
    producer = clients.transactional_producer(kafka, name)
    producer.init_transactions(120)
    for number in range(30):
        producer.begin_transaction()
        producer.produce(name, str(number).encode(), b"key", 0)
        producer.commit_transaction(120)
    producer.begin_transaction()
    for _ in range(60):
        producer.produce(name, b"aborted", b"key", 0)
    producer.flush(120)
    producer.abort_transaction(120)
    plain = clients.producer(kafka)
    for partition in (0, 1):
        plain.produce(name, b"last", b"key", partition)
    assert plain.flush(120) == 0
    await_decided(kafka, name, "reading the last records")
    return name


@pytest.mark.parametrize(("wanted", "expected"), [(0, []), (1, []), (3, [28, 29]), (31, range(30)), (500, range(30))])
def test_the_last_records_of_each_partition_are_that_many(
    broker: str, topic: str, wanted: int, expected: list[int]
) -> None:
    read = list(messages(KafkaConfig(bootstrap_servers=broker), topic, ReadSpan(start=f"-{wanted}")))
    values = {p: [(m.value or b"").decode() for m in read if m.partition == p] for p in range(3)}
    last = ["last"] if wanted else []
    assert values == {0: [*map(str, expected), *last], 1: last, 2: []}
