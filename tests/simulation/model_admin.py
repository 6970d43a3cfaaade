"""Answers of an admin client about the topics of the model: names, ids, partitions."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, KafkaError, TopicPartition
from confluent_kafka.admin._listoffsets import OffsetSpec

from tests.simulation.cluster import Cluster

_EARLIEST = type(OffsetSpec.earliest())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class TopicMetadata:
    """One topic."""

    partitions: Mapping[int, None] = field(default_factory=dict)
    error: KafkaError | None = None


class Metadata(NamedTuple):
    """Topics by name, and the ids of the brokers that are up."""

    topics: Mapping[str, TopicMetadata]
    brokers: Mapping[int, None] = MappingProxyType({1: None})


class Description(NamedTuple):
    """A topic with its id."""

    topic_id: str


def metadata_of(cluster: Cluster, topic: str | None) -> Metadata:
    """Return the metadata of a topic, or of all."""
    names = [topic] if topic is not None else list(cluster.topics)
    return Metadata({name: _metadata(cluster, name) for name in names})


def _metadata(cluster: Cluster, name: str) -> TopicMetadata:
    if name not in cluster.topics:
        return TopicMetadata(error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    return TopicMetadata(dict.fromkeys(range(len(cluster.topics[name]))))


class ModelAdmin:
    """Answers at once, without the network of the model."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Metadata:
        return metadata_of(self._cluster, topic)

    def describe_topics(self, topics: Any) -> dict[str, "Future[Description]"]:
        return {name: _done(Description(f"id-of-{name}")) for name in topics.topic_names}

    def list_offsets(
        self,
        places: Mapping[TopicPartition, Any],
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        request_timeout: float = -1,
    ) -> dict[TopicPartition, "Future[ListedOffset]"]:
        """Return beginnings and ends; no other offsets are asked for."""
        committed = isolation_level == IsolationLevel.READ_COMMITTED
        answers = {}
        for place, spec in places.items():
            log = self._cluster.log((place.topic, place.partition))
            end = log.stable if committed else log.end
            answers[place] = _done(ListedOffset(log.begin if isinstance(spec, _EARLIEST) else end))
        return answers

    def list_consumer_groups(self, *, request_timeout: float) -> "Future[GroupList]":
        return _done(GroupList([GroupListing(name) for name in self._cluster.groups]))

    def describe_configs(self, resources: Iterable[Any], *, request_timeout: float) -> dict[Any, "Future[Any]"]:
        return {resource: _done({}) for resource in resources}

    def describe_consumer_groups(self, names: Iterable[str], *, request_timeout: float) -> dict[str, "Future[Any]"]:
        assert request_timeout > 0
        return {name: _done(GroupDescription(tuple(self._cluster.groups[name].members))) for name in names}


class ListedOffset(NamedTuple):
    """An offset, without the time of its record."""

    offset: int
    timestamp: int = -1


class GroupListing(NamedTuple):
    """One group in a list."""

    group_id: str


class GroupList(NamedTuple):
    """All groups, and the errors of brokers that listed none."""

    valid: list[GroupListing]
    errors: tuple[Any, ...] = ()


class GroupDescription(NamedTuple):
    """Members of a group."""

    members: tuple[str, ...]
    state: str = "Stable"


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future
