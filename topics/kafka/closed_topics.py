"""Closes a topic to every writer, and opens it again.

Kafka has no read-only topics. A record limit of a few bytes has the same effect: the leader of each partition refuses
our records, which are larger, and still accepts transaction markers, which are smaller.
"""

import time

from confluent_kafka import KafkaException
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, DeadlineExceeded
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_errors import answer_of
from rollstream.topics.kafka.sender import Failure, Sender

CLOSED_BYTES = 80
"""Record limit of a closed topic. A transaction marker takes 78 bytes; the header of a batch of records alone, 61."""
_SETTING = "max.message.bytes"
_TIMEOUT_S = 60.0


def close(kafka: KafkaConfig, topic: str, probe: bytes, key: bytes, partitions: int) -> None:
    """Close a topic; once this returns, every partition refuses records.

    `probe` is a harmless record of at least `CLOSED_BYTES`. It is sent to each partition until the partition refuses
    it, because brokers apply the setting one after another. A broker applies the setting before it becomes a leader.
    Raises DeadlineExceeded if a partition still accepts records after a minute.
    """
    _set(kafka, topic, CLOSED_BYTES)
    open_partitions = set(range(partitions))
    deadline = time.monotonic() + _TIMEOUT_S
    while open_partitions:
        refused: set[int] = set()

        def failed(failure: Failure, refused: set[int] = refused) -> None:
            if failure.too_large:
                refused.add(failure.partition)

        with Sender(clients.producer(kafka, **{"linger.ms": "0"}), on_failure=failed) as sender:
            for partition in open_partitions:
                sender.send(topic, probe, key, partition=partition)
        open_partitions -= refused
        if open_partitions and time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"partitions {sorted(open_partitions)} of {topic} still accept records {_TIMEOUT_S:g} s after the "
                f"topic was closed; check whether a broker lags behind its controller"
            )


def is_closed(kafka: KafkaConfig, topic: str) -> bool:
    """Whether a topic is closed."""
    # The variable keeps the client from being garbage-collected during the request.
    client, resource = clients.admin(kafka), ConfigResource(ResourceType.TOPIC, topic)
    try:
        settings = answer_of(client.describe_configs([resource])[resource], _TIMEOUT_S)
    except KafkaException as error:
        raise BrokerUnavailable(f"settings of {topic} cannot be read: {error.args[0].str()}") from error
    return str(settings[_SETTING].value) == str(CLOSED_BYTES)


def reopen(kafka: KafkaConfig, topic: str) -> None:
    """Let a topic accept records of up to the configured size again."""
    _set(kafka, topic, kafka.max_record_bytes)


def _set(kafka: KafkaConfig, topic: str, limit_bytes: int) -> None:
    entry = ConfigEntry(_SETTING, str(limit_bytes), incremental_operation=AlterConfigOpType.SET)
    client, resource = clients.admin(kafka), ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    try:
        answer_of(client.incremental_alter_configs([resource])[resource], _TIMEOUT_S)
    except KafkaException as error:
        raise BrokerUnavailable(f"settings of {topic} cannot be changed: {error.args[0].str()}") from error
