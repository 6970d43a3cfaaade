"""Answers of an admin client about the model: topics and their settings, offsets, deletions, groups."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_END, ConsumerGroupState, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin._config import AlterConfigOpType
from confluent_kafka.admin._listoffsets import OffsetSpec

from tests.simulation.cluster import Cluster
from tests.simulation.group_coordinator import Group
from tests.simulation.partition_log import PartitionLog

_EARLIEST, _NEWEST = (
    type(spec)
    for spec in (OffsetSpec.earliest(), OffsetSpec.max_timestamp())  # type: ignore[no-untyped-call]
)


class Broker(NamedTuple):
    """The only broker."""

    id: int = 1
    host: str = "model"
    port: int = 1


@dataclass(frozen=True)
class PartitionMetadata:
    """One partition, on the only broker."""

    leader: int = 1
    replicas: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class TopicMetadata:
    """One topic."""

    partitions: Mapping[int, PartitionMetadata] = field(default_factory=dict)
    error: KafkaError | None = None


class Metadata(NamedTuple):
    """Topics by name, and the brokers that are up by id."""

    topics: Mapping[str, TopicMetadata]
    brokers: Mapping[int, Broker] = MappingProxyType({1: Broker()})


class Description(NamedTuple):
    """A topic with its id."""

    topic_id: str
    partitions: tuple[int, ...] = ()


class Setting(NamedTuple):
    """A setting of a topic or of the broker."""

    name: str
    value: str


class ListedOffset(NamedTuple):
    """An offset, with the time of its record if that was asked for."""

    offset: int
    timestamp: int = -1


class DeletedRecords(NamedTuple):
    """Where a partition begins after a deletion."""

    low_watermark: int


class GroupListing(NamedTuple):
    """One group in a list."""

    group_id: str


class GroupList(NamedTuple):
    """All groups, and the errors of brokers that listed none."""

    valid: list[GroupListing]
    errors: tuple[Any, ...] = ()


class Assignment(NamedTuple):
    """Partitions of a member."""

    topic_partitions: list[TopicPartition]


class MemberDescription(NamedTuple):
    """One member of a group."""

    member_id: str
    group_instance_id: str
    assignment: Assignment


class GroupDescription(NamedTuple):
    """Members of a group."""

    members: list[MemberDescription]
    state: ConsumerGroupState


def metadata_of(cluster: Cluster, topic: str | None) -> Metadata:
    """Return the metadata of a topic, or of all."""
    names = [topic] if topic is not None else list(cluster.topics)
    return Metadata({name: _metadata(cluster, name) for name in names})


def _metadata(cluster: Cluster, name: str) -> TopicMetadata:
    if name not in cluster.topics:
        return TopicMetadata(error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    return TopicMetadata({number: PartitionMetadata() for number in range(len(cluster.topics[name]))})


class ModelAdmin:
    """Answers at once, without the network of the model."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Metadata:
        return metadata_of(self._cluster, topic)

    # ------------------------------------------------------------------ topics

    def create_topics(self, topics: Iterable[Any], **_limits: float) -> dict[str, "Future[None]"]:
        return {topic.topic: self._created(topic) for topic in topics}

    def _created(self, topic: Any) -> "Future[None]":
        if topic.topic in self._cluster.topics:
            return _refused(KafkaError.TOPIC_ALREADY_EXISTS, f"Topic '{topic.topic}' already exists.")
        if topic.replication_factor > 1:
            return _refused(
                KafkaError.INVALID_REPLICATION_FACTOR,
                f"Unable to replicate the partition {topic.replication_factor} time(s): The target replication factor "
                f"of {topic.replication_factor} cannot be reached because only 1 broker(s) are registered.",
            )
        self._cluster.create(topic.topic, topic.num_partitions, topic.config or {})
        return _done(None)

    def delete_topics(self, names: Iterable[str], **_limits: float) -> dict[str, "Future[None]"]:
        return {name: self._deleted(name) for name in names}

    def _deleted(self, name: str) -> "Future[None]":
        if self._cluster.topics.pop(name, None) is None:
            return _refused(KafkaError.UNKNOWN_TOPIC_OR_PART)
        for group in self._cluster.groups.values():
            for place in [place for place in group.offsets if place[0] == name]:
                del group.offsets[place]
        return _done(None)

    def create_partitions(self, topics: Iterable[Any], **_limits: float) -> dict[str, "Future[None]"]:
        for topic in topics:
            logs = self._cluster.topics[topic.topic]
            logs.extend(PartitionLog() for _ in range(topic.new_total_count - len(logs)))
        return {topic.topic: _done(None) for topic in topics}

    def describe_topics(self, topics: Any) -> dict[str, "Future[Description]"]:
        return {
            name: _done(Description(self._cluster.topic_ids[name], tuple(range(len(self._cluster.topics[name])))))
            if name in self._cluster.topics
            else _refused(KafkaError.UNKNOWN_TOPIC_OR_PART)
            for name in topics.topic_names
        }

    def describe_configs(self, resources: Iterable[Any], **_limits: float) -> dict[Any, "Future[dict[str, Setting]]"]:
        answers = {}
        for resource in resources:
            settings = self._cluster.settings.get(resource.name, {})
            if resource.restype.name == "TOPIC" and resource.name not in self._cluster.topics:
                answers[resource] = _refused(KafkaError.UNKNOWN_TOPIC_OR_PART)
            else:
                answers[resource] = _done({name: Setting(name, value) for name, value in settings.items()})
        return answers

    def incremental_alter_configs(self, resources: Iterable[Any], **_limits: float) -> dict[Any, "Future[None]"]:
        answers = {}
        for resource in resources:
            for entry in resource.incremental_configs:
                if entry.incremental_operation == AlterConfigOpType.DELETE:
                    self._cluster.reset(resource.name, entry.name)
                else:
                    self._cluster.settings[resource.name][entry.name] = entry.value
            answers[resource] = _done(None)
        return answers

    # ------------------------------------------------------------------ offsets

    def list_offsets(
        self,
        places: Mapping[TopicPartition, Any],
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        request_timeout: float = -1,
    ) -> dict[TopicPartition, "Future[ListedOffset]"]:
        """Return beginnings, ends, and the offsets of the newest records; no other offsets are asked for."""
        committed = isolation_level == IsolationLevel.READ_COMMITTED
        answers = {}
        for place, spec in places.items():
            if place.topic not in self._cluster.topics:
                answers[place] = _refused(KafkaError.UNKNOWN_TOPIC_OR_PART)
                continue
            log = self._cluster.log((place.topic, place.partition))
            end = log.stable if committed else log.end
            if isinstance(spec, _NEWEST):
                newest = max(log.entries[log.begin : end], key=lambda entry: entry.timestamp_ms, default=None)
                answers[place] = _done(ListedOffset(newest.offset, newest.timestamp_ms) if newest else ListedOffset(-1))
            else:
                answers[place] = _done(ListedOffset(log.begin if isinstance(spec, _EARLIEST) else end))
        return answers

    def delete_records(
        self, places: Iterable[TopicPartition], **_limits: float
    ) -> dict[TopicPartition, "Future[DeletedRecords]"]:
        answers = {}
        for place in places:
            if self._cluster.settings[place.topic]["cleanup.policy"] == "compact":
                answers[place] = _refused(KafkaError.POLICY_VIOLATION)
                continue
            log = self._cluster.log((place.topic, place.partition))
            offset = log.stable if place.offset == OFFSET_END else place.offset
            if offset > log.stable:
                answers[place] = _refused(KafkaError.OFFSET_OUT_OF_RANGE)
                continue
            log.begin = max(log.begin, offset)
            answers[place] = _done(DeletedRecords(log.begin))
        return answers

    # ------------------------------------------------------------------ groups

    def list_consumer_groups(self, *, request_timeout: float) -> "Future[GroupList]":
        return _done(GroupList([GroupListing(name) for name in self._cluster.groups]))

    def describe_consumer_groups(self, names: Iterable[str], *, request_timeout: float) -> dict[str, "Future[Any]"]:
        assert request_timeout > 0
        return {name: _described(self._cluster.groups.get(name)) for name in names}

    def delete_consumer_groups(self, names: Iterable[str], **_limits: float) -> dict[str, "Future[None]"]:
        return {name: self._without(name) for name in names}

    def _without(self, name: str) -> "Future[None]":
        group = self._cluster.groups.get(name)
        if group is None or not (group.generation or group.offsets):
            return _refused(KafkaError.GROUP_ID_NOT_FOUND)
        if group.members:
            return _refused(KafkaError.NON_EMPTY_GROUP)
        del self._cluster.groups[name]
        return _done(None)


def _described(group: Group | None) -> "Future[GroupDescription]":
    if group is None or not (group.members or group.offsets):
        return _refused(KafkaError.GROUP_ID_NOT_FOUND)
    members = [
        MemberDescription(
            member.name,
            member.instance,
            Assignment([TopicPartition(group.topic, number) for number in member.assignment]),
        )
        for member in group.members.values()
    ]
    state = ConsumerGroupState.STABLE if members else ConsumerGroupState.EMPTY
    return _done(GroupDescription(members, ConsumerGroupState.PREPARING_REBALANCING if group.rebalancing else state))


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _refused(code: int, text: str = "") -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(KafkaException(KafkaError(code, text or KafkaError(code).str())))
    return future
