"""Consumer groups as the brokers know them: their names, members and committed offsets."""

from functools import partial

from confluent_kafka import ConsumerGroupState, ConsumerGroupTopicPartitions, KafkaError, KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_errors import retrying
from rollstream.topics.kafka.records import GroupPosition

_TIMEOUT_S = 30.0


def members(kafka: KafkaConfig, group: str) -> int:
    """Number of members of a consumer group."""
    client = clients.admin(kafka)

    def count() -> int:
        try:
            description = client.describe_consumer_groups([group])[group].result(kafka.patience_s)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            raise
        idle = description.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)
        return 0 if idle else len(description.members)

    return retrying(count, f"describing group {group}", kafka.patience_s)


def group_names(kafka: KafkaConfig) -> list[str]:
    """Names of all consumer groups, sorted. Raises BrokerUnavailable."""
    client = clients.admin(kafka)
    listed = retrying(lambda: client.list_consumer_groups().result(_TIMEOUT_S), "listing consumer groups")
    return sorted(item.group_id for item in listed.valid)


def group_positions(kafka: KafkaConfig, group: str) -> list[GroupPosition]:
    """All positions that a group has committed. Raises BrokerUnavailable."""
    client = clients.admin(kafka)
    answer = client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
    offsets = retrying(partial(answer.result, _TIMEOUT_S), f"asking for offsets of group {group}")
    return [GroupPosition.from_client(place) for place in offsets.topic_partitions or () if place.offset >= 0]
