"""Age of the records at which a consumer group stands: how long the oldest one that it has not read has waited."""

import time

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_errors import denial

_WAIT_S = 20.0


def oldest_age_s(kafka: KafkaConfig, group: str) -> float | None:
    """Return the age in seconds of the oldest record at which a group stands; None if it has read all of them.

    Raises AccessDenied if this client's user may not see the group, BrokerUnavailable.
    """
    client = clients.admin(kafka)
    try:
        answer = client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(_WAIT_S)
    except KafkaException as exception:
        doing = f"asking where group {group} stands"
        error = exception.args[0]
        raise denial(error, doing) or BrokerUnavailable(f"{doing}: {error.str()}") from exception
    places = [TopicPartition(p.topic, p.partition, p.offset) for p in answer.topic_partitions if p.offset >= 0]
    waiting = {(place.topic, place.partition) for place in places}
    reader, ages = clients.reader(kafka), []
    deadline = time.monotonic() + _WAIT_S
    try:
        reader.assign(places)
        while waiting and time.monotonic() < deadline:
            message = reader.poll(0.5)
            if message is None:
                continue
            place = str(message.topic()), int(message.partition() or 0)
            if place in waiting and message.error() is None:
                ages.append(time.time() - message.timestamp()[1] / 1000)
            waiting.discard(place)
    finally:
        reader.close()
    return max(ages, default=None)
