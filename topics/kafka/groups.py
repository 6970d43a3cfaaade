"""Consumer groups as the brokers know them: their members and committed offsets."""

from collections.abc import Iterable

from confluent_kafka import ConsumerGroupState, ConsumerGroupTopicPartitions, KafkaError, KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_errors import answer_of, retrying
from rollstream.topics.kafka.hanging_transactions import admin_client
from rollstream.topics.kafka.records import GroupPosition

_TIMEOUT_S = 30.0


def members(kafka: KafkaConfig, group: str) -> int:
    """Number of members of a consumer group."""
    client = clients.admin(kafka)

    def count() -> int:
        try:
            description = answer_of(client.describe_consumer_groups([group])[group], kafka.patience_s)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            raise
        idle = description.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)
        return 0 if idle else len(description.members)

    return retrying(count, f"describing group {group}", kafka.patience_s)


def remove_members(kafka: KafkaConfig, group: str, names: Iterable[str]) -> list[str]:
    """Remove static members that have ended, so that their partitions need not wait for the end of their sessions.

    Returns the names that the group did not have. Raises BrokerUnavailable if the request fails, ConfigurationError if
    kafka.client has a TLS or SASL key that kafka-python does not support.
    """
    # Imported late: librdkafka has no such request, and few processes need it.
    from kafka.admin import MemberToRemove
    from kafka.errors import KafkaError as OtherKafkaError
    from kafka.errors import NoError

    leaving = [MemberToRemove(group_instance_id=name) for name in names]
    with admin_client(kafka) as client:
        try:
            answers = client.remove_group_members(group, leaving)
        except (OtherKafkaError, OSError, ValueError) as error:
            raise BrokerUnavailable(f"removing members of group {group}: {error}") from error
    return sorted(str(name) for name, answer in answers.items() if answer is not NoError)


def group_positions(kafka: KafkaConfig, group: str) -> list[GroupPosition]:
    """All positions that a group has committed. Raises BrokerUnavailable."""
    client = clients.admin(kafka)

    def committed() -> list[GroupPosition]:
        answer = answer_of(client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group], _TIMEOUT_S)
        return [GroupPosition.from_client(place) for place in answer.topic_partitions or () if place.offset >= 0]

    return retrying(committed, f"asking for offsets of group {group}", kafka.patience_s)
