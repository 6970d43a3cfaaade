"""Consumer groups as the brokers know them: their members and committed offsets."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.client_errors import COORDINATOR_REQUEST_S, answer_of, retrying
from rollstream.topics.kafka.hanging_transactions import admin_client
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition


def _described(kafka: KafkaConfig, group: str, timeout_s: float) -> Any:
    """Return the client's description of a group; None if there is no such group. Raises BrokerUnavailable."""
    client = clients.admin(kafka)

    def description() -> Any:
        try:
            request = client.describe_consumer_groups([group], request_timeout=COORDINATOR_REQUEST_S)[group]
            return answer_of(request, timeout_s)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return None
            raise

    return retrying(description, f"describing group {group}", timeout_s)


def members(kafka: KafkaConfig, group: str) -> int:
    """Number of members of a consumer group."""
    description = _described(kafka, group, kafka.patience_s)
    if description is None or description.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD):
        return 0
    return len(description.members)


class GroupAssignment(NamedTuple):
    """The partitions of a topic as a group has assigned them to its members."""

    unowned: frozenset[int]
    """Partitions that belong to no member."""
    idle: list[str]
    """Names of the static members without a partition, in order."""


def group_assignment(kafka: KafkaConfig, group: str, topic: str, timeout_s: float) -> GroupAssignment | None:
    """Return the assignment of a stable group; None if the group is rebalancing or has no members.

    `timeout_s` limits the description. Raises TopicError if the topic is missing, and BrokerUnavailable if no broker
    answers.
    """
    partitions = range(topic_admin.partitions_of(kafka, topic))
    description = _described(kafka, group, timeout_s)
    if description is None or description.state is not ConsumerGroupState.STABLE:
        return None
    owned, idle = set[int](), []
    for member in description.members:
        places = {place.partition for place in member.assignment.topic_partitions if place.topic == topic}
        owned |= places
        if not places and member.group_instance_id:
            idle.append(member.group_instance_id)
    return GroupAssignment(frozenset(partitions) - owned, sorted(idle))


def remove_members(kafka: KafkaConfig, group: str, names: Iterable[str]) -> list[str]:
    """Remove static members, whose partitions then need not wait for the end of a session. One that lives joins again.

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


def group_positions(kafka: KafkaConfig, group: str, places: Mapping[str, Iterable[int]]) -> list[GroupPosition]:
    """Positions that a group has committed in these partitions, by full name of their topic. Raises BrokerUnavailable.

    A consumer asks: if a coordinator that has just started refuses an admin client's request for offsets, librdkafka
    2.16.0 ends the process (ListConsumerGroupOffsets refused with NOT_COORDINATOR). Offsets in an open transaction are
    not waited for.
    """
    doing = f"asking for offsets of group {group}"
    with Reader(kafka, group=group, isolation="read_uncommitted", doing=doing) as reader:
        positions = (reader.committed(topic, partitions, doing) for topic, partitions in places.items())
        return [position for of_topic in positions for position in of_topic if position.offset >= 0]
