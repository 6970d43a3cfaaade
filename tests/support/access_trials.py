"""Tries operations on a broker as one of its users: what is refused for lack of permission, and what is not."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.support.waiting import eventually

Trial = tuple[str, str, str]
"""Resource, its name, and the operation that was tried on it."""
_DENIALS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
_WAIT_S = 60.0


class Trials:
    """Operations of one user."""

    def __init__(self, client: Mapping[str, str], reading_group: str) -> None:
        """Connect with librdkafka's settings; `reading_group` is one that every user may name."""
        self._client, self._group = {**client, "log_level": "2"}, reading_group
        self._admin = AdminClient(self._client)

    def all(self, topics: list[str], groups: list[str], ids: list[str]) -> dict[Trial, bool]:
        """Whether each operation is allowed: on topics, groups, transactional ids and the cluster."""
        tried: dict[Trial, bool] = {}
        for part in (self._reads(topics), self._writes(topics), self._settings(topics), self._group_trials(groups)):
            tried |= part
        with ThreadPoolExecutor(8) as pool:
            tried |= {("transactionalId", name, "Write"): allowed for name, allowed in pool.map(self._takes, ids)}
        return tried | self._cluster()

    def _reads(self, topics: list[str]) -> dict[Trial, bool]:
        described = self._admin.describe_topics(TopicCollection(topics))
        seen = {topic: _allowed(future.result) for topic, future in described.items()}
        tried = {("topic", topic, "Describe"): may for topic, may in seen.items()}
        # A client reads nothing of a topic that it may not see, and says nothing about it.
        reads = {("topic", topic, "Read"): False for topic in topics}
        return tried | reads | self._fetches([topic for topic, may in seen.items() if may])

    def _fetches(self, topics: list[str]) -> dict[Trial, bool]:
        consumer = Consumer({**self._client, "group.id": self._group, "enable.partition.eof": True})
        allowed: dict[str, bool] = {}

        def heard_of_all() -> bool:
            for message in consumer.consume(100, 0.2):
                error = message.error()
                if error is None or error.code() in {*_DENIALS, KafkaError._PARTITION_EOF}:
                    allowed[str(message.topic())] = error is None or error.code() == KafkaError._PARTITION_EOF
            return len(allowed) == len(topics)

        try:
            consumer.assign([TopicPartition(topic, 0, 0) for topic in topics])
            eventually(heard_of_all, _WAIT_S, "an answer for every topic that is read")
        finally:
            consumer.close()
        return {("topic", topic, "Read"): may for topic, may in allowed.items()}

    def _writes(self, topics: list[str]) -> dict[Trial, bool]:
        producer = Producer({**self._client, "enable.idempotence": False, "message.timeout.ms": 60_000})
        allowed: dict[str, bool] = {}

        def delivered(error: KafkaError | None, message: Any) -> None:
            assert error is None or error.code() in _DENIALS, error
            allowed[message.topic()] = error is None

        for topic in topics:
            producer.produce(topic, b"a trial", b"a trial", 0, delivered)
        assert producer.flush(_WAIT_S) == 0
        return {("topic", topic, "Write"): may for topic, may in allowed.items()}

    def _settings(self, topics: list[str]) -> dict[Trial, bool]:
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        entry = [ConfigEntry("segment.ms", "604800000", incremental_operation=AlterConfigOpType.SET)]
        altered = [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entry) for topic in topics]
        admin = self._admin
        answers: dict[str, Mapping[Any, Any]] = {
            "DescribeConfigs": admin.describe_configs(resources),
            "AlterConfigs": admin.incremental_alter_configs(altered, validate_only=True),
            "Create": admin.create_topics([NewTopic(topic, 1, 1) for topic in topics], validate_only=True),
            "Alter": admin.create_partitions([NewPartitions(topic, 64) for topic in topics], validate_only=True),
            "Delete": admin.delete_records([TopicPartition(topic, 0, 0) for topic in topics]),
        }
        return {
            ("topic", getattr(key, "name", getattr(key, "topic", key)), operation): _allowed(future.result)
            for operation, futures in answers.items()
            for key, future in futures.items()
        }

    def _group_trials(self, groups: list[str]) -> dict[Trial, bool]:
        admin, tried = self._admin, {}
        for group in groups:
            listed = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
            tried["group", group, "Describe"] = _allowed(listed[group].result)
            place = [TopicPartition("nothing", 0, 0)]
            altered = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, place)])
            tried["group", group, "Read"] = _allowed(altered[group].result, KafkaError.GROUP_AUTHORIZATION_FAILED)
        for group, future in admin.delete_consumer_groups(groups).items():
            tried["group", group, "Delete"] = _allowed(future.result)
        return tried

    def _takes(self, identity: str) -> tuple[str, bool]:
        producer = Producer({**self._client, "transactional.id": identity})
        return identity, _allowed(lambda _wait: producer.init_transactions(_WAIT_S))

    def _cluster(self) -> dict[Trial, bool]:
        anything: Any = None
        every = AclBindingFilter(
            ResourceType.ANY,
            anything,
            ResourcePatternType.ANY,
            anything,
            anything,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        broker = ConfigResource(ResourceType.BROKER, "1")
        return {
            # The client hides the refusal and shows no rules.
            ("cluster", "kafka-cluster", "Describe"): bool(self._admin.describe_acls(every).result(_WAIT_S)),
            ("cluster", "kafka-cluster", "Alter"): _allowed(self._admin.delete_acls([every])[every].result),
            ("cluster", "kafka-cluster", "DescribeConfigs"): _allowed(
                self._admin.describe_configs([broker])[broker].result
            ),
        }


def _allowed(call: Callable[[float], Any], *denials: int) -> bool:
    """Whether a call is not refused for lack of permission, however it ends."""
    try:
        answer = call(_WAIT_S)
    except KafkaException as exception:
        return exception.args[0].code() not in (denials or _DENIALS)
    partitions: Iterable[Any] = getattr(answer, "topic_partitions", None) or ()
    return not any(place.error is not None and place.error.code() in (denials or _DENIALS) for place in partitions)
