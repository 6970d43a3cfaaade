"""Administration of topics: names, ids, partitions and their offsets, deletions."""

import difflib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, TopicError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_calls import answer_of, denial, retrying
from rollstream.topics.kafka.records import Place
from rollstream.topics.wire.catalogue import run_and_name

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._metadata import ClusterMetadata

_TIMEOUT_S = 30.0
_ANSWER_S = 10.0
_LOOK_S = 1.0
"""Longest wait for one answer about the brokers, and between two requests."""
Settings = Mapping[str, Any]
"""Settings of a topic or a broker, by name; the client has no type for them."""
_NAMED = 3
"""Largest number of runs that an error names."""


class OffsetAndTime(NamedTuple):
    """An offset of a partition, with a time."""

    offset: int
    timestamp_ms: int
    """-1 if there is no record at the offset."""


def topic_names(kafka: KafkaConfig) -> list[str]:
    """Names of all topics of the cluster, sorted. Raises BrokerUnavailable."""
    return sorted(_listed(kafka, clients.admin(kafka)).topics)


def _listed(kafka: KafkaConfig, client: "AdminClient | Consumer", topic: str | None = None) -> "ClusterMetadata":
    """Return what brokers say about a topic, or about all. A request fails at once if its broker goes down, so it is
    made again. Raises BrokerUnavailable if no broker answers."""
    try:
        return retrying(lambda: client.list_topics(topic, timeout=_ANSWER_S), "listing topics", _TIMEOUT_S)
    except AccessDenied:
        raise
    except BrokerUnavailable as error:
        raise BrokerUnavailable(f"no Kafka broker answers at {kafka.bootstrap_servers}: {error}") from error


def await_brokers(kafka: KafkaConfig, count: int, timeout_s: float) -> None:
    """Wait until `count` brokers are in the cluster. Raises BrokerUnavailable if they are not within `timeout_s`."""
    client = clients.admin(kafka, error_cb=lambda _error: None)
    deadline, present = time.monotonic() + timeout_s, 0
    while present < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise BrokerUnavailable(
                f"{present} of {count} brokers answer at {kafka.bootstrap_servers} after {timeout_s:g} s; start more "
                "brokers, or lower topics.replication_factor"
            )
        try:
            present = len(client.list_topics(timeout=min(left_s, _LOOK_S)).brokers)
        except KafkaException:
            present = 0
        if present < count:
            time.sleep(min(max(0.0, deadline - time.monotonic()), _LOOK_S))


def group_names(kafka: KafkaConfig) -> list[str]:
    """Names of all consumer groups, sorted. Raises BrokerUnavailable if a broker does not list its groups."""

    def listed() -> list[str]:
        # A new client, because a client goes on asking a broker that has left the cluster.
        client = clients.admin(kafka)
        # The answer names the groups of the other brokers if one is starting or out of reach.
        answer = answer_of(client.list_consumer_groups(request_timeout=_ANSWER_S), 2 * _ANSWER_S)
        if answer.errors:
            raise KafkaException(answer.errors[0])
        return sorted(group.group_id for group in answer.valid or ())

    return retrying(listed, "listing consumer groups", kafka.patience_s)


def partitions_of(config: KafkaConfig, topic: str, client: "AdminClient | Consumer | None" = None) -> int:
    """Number of partitions of a topic, requested with `client` if given; `client` knows the leaders afterwards.

    Raises TopicError if the topic does not exist, BrokerUnavailable if no broker answers.
    """
    metadata = _listed(config, client or clients.admin(config), topic).topics[topic]
    if metadata.error is not None:
        if denied := denial(metadata.error, f"looking at topic {topic}"):
            raise denied
        raise _missing(config, topic, metadata.error.name())
    return len(metadata.partitions)


def retention_s(config: KafkaConfig, topic: str) -> float | None:
    """Time for which brokers keep a record of a topic, infinite if forever; None if the topic is missing or this user
    may not see its settings."""
    client = clients.admin(config)
    try:
        return retention_in(answer_of(request_settings(client, topic), _TIMEOUT_S))
    except KafkaException:
        return None


def request_settings(client: "AdminClient", topic: str) -> Future[Settings]:
    """Request the settings of a topic without waiting for the answer, which comes or fails within 30 s."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    return client.describe_configs([resource], request_timeout=_TIMEOUT_S)[resource]


def retention_in(settings: Settings) -> float:
    """Return the time for which brokers keep a record of a topic with these settings; infinite if they keep it forever
    or do not say."""
    retention_ms = _number(settings, "retention.ms")
    return math.inf if retention_ms is None or retention_ms < 0 else retention_ms / 1000


def broker_settings(config: KafkaConfig) -> Settings:
    """Settings of one of the brokers, by name; empty if this user may not see them."""
    client = clients.admin(config)
    resources = [ConfigResource(ResourceType.BROKER, str(n)) for n in sorted(_listed(config, client).brokers)[:1]]
    try:
        return {
            name: value
            for r in resources
            for name, value in answer_of(client.describe_configs([r])[r], _TIMEOUT_S).items()
        }
    except KafkaException:
        return {}


def _number(settings: Settings, name: str) -> int | None:
    # Brokers that only speak Kafka's protocol may lack it.
    return int(settings[name].value) if name in settings and settings[name].value else None


def runs(config: KafkaConfig) -> dict[str, dict[str, int]]:
    """Number of partitions of every run's topics, by run and by topic. Raises BrokerUnavailable."""
    topics = _listed(config, clients.admin(config)).topics
    partitions_by_run: dict[str, dict[str, int]] = {}
    for topic, metadata in sorted(topics.items()):
        place = run_and_name(topic)
        if place is not None:
            partitions_by_run.setdefault(place[0], {})[place[1]] = len(metadata.partitions)
    return partitions_by_run


def _missing(config: KafkaConfig, topic: str, why: str) -> TopicError:
    """Return the error for a missing topic: the run has another name, or its topics must be created."""
    place, there = run_and_name(topic), runs(config)
    if place is not None and place[0] not in there:
        near = difflib.get_close_matches(place[0], there, 1, 0.8)
        if near:
            return TopicError(
                f"topic {topic} is missing: there is no run {place[0]}; did you mean --run {near[0]}? "
                f"`rollstream runs` lists all runs"
            )
        if there:
            more = f" and {len(there) - _NAMED} more (`rollstream runs`)" if len(there) > _NAMED else ""
            why += f"; there is no run {place[0]}, but {', '.join([*there][:_NAMED])}{more}"
    return TopicError(f"topic {topic} is missing ({why}); create it with `rollstream topics apply`")


def bounds(config: KafkaConfig, topic: str, partitions: Iterable[int] | None = None) -> dict[int, tuple[int, int]]:
    """First offset of each partition, and the offset past its last record; by default of all partitions.

    Raises as `partitions_of` does.
    """
    consumer = clients.reader(config)
    try:
        known = range(partitions_of(config, topic, consumer))
        return bounds_through(consumer, topic, known if partitions is None else partitions)
    finally:
        consumer.close()


def bounds_through(
    consumer: Consumer, topic: str, partitions: Iterable[int], timeout_s: float = _TIMEOUT_S
) -> dict[int, tuple[int, int]]:
    """As `bounds`, through an existing consumer, whose isolation level applies.

    Each leader is asked twice, however many partitions it leads; `get_watermark_offsets` would ask it twice for each.
    """
    places = list(partitions)

    def ask(which: int) -> dict[int, int]:
        answers = consumer.offsets_for_times([TopicPartition(topic, p, which) for p in places], _ANSWER_S)
        for answer in answers:
            if answer.error is not None:
                raise KafkaException(answer.error)
        return {answer.partition: answer.offset for answer in answers}

    if not places:
        return {}
    # The beginnings first: a beginning that was asked for later might be past the end.
    begins, ends = (
        retrying(partial(ask, which), f"asking where {topic} begins and ends", timeout_s)
        for which in (OFFSET_BEGINNING, OFFSET_END)
    )
    return {p: (begins[p], ends[p]) for p in places}


def topic_ids(kafka: KafkaConfig, names: list[str]) -> dict[str, str]:
    """Kafka's id of each topic; a topic that is recreated gets a new id. Raises TopicError if a topic is missing."""
    client = clients.admin(kafka)
    ids = {}
    for name, future in client.describe_topics(TopicCollection(names)).items():
        try:
            ids[name] = str(answer_of(future, _TIMEOUT_S).topic_id)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise _missing(kafka, name, error.args[0].name()) from error
            if denied := denial(error.args[0], f"looking at topic {name}"):
                raise denied from error
            raise BrokerUnavailable(f"topic {name} cannot be described: {error.args[0].str()}") from error
    return ids


def offsets(
    kafka: KafkaConfig, places: Iterable[Place], which: Literal["earliest", "latest", "max_timestamp"]
) -> dict[Place, OffsetAndTime]:
    """First offset, end, or offset of the highest timestamp, by partition. Raises AccessDenied or BrokerUnavailable."""
    # Imported late, as in clients.admin.
    from confluent_kafka.admin._listoffsets import OffsetSpec

    spec: Any = getattr(OffsetSpec, which)()
    wanted = {TopicPartition(*place): spec for place in places}
    if not wanted:
        return {}
    client = clients.admin(kafka)

    def ask() -> dict[Place, OffsetAndTime]:
        answers = {
            (place.topic, place.partition): answer_of(future, _TIMEOUT_S)
            for place, future in client.list_offsets(wanted, request_timeout=_TIMEOUT_S).items()
        }
        return {place: OffsetAndTime(answer.offset, answer.timestamp) for place, answer in answers.items()}

    # The leader of a new topic may not know yet that it leads.
    return retrying(ask, f"asking where {', '.join(sorted({place.topic for place in wanted}))} ends")


def delete_records(kafka: KafkaConfig, below: Mapping[Place, int], timeout_s: float = _TIMEOUT_S) -> None:
    """Delete the records below an offset of each partition. Raises BrokerUnavailable if a broker refuses."""
    if not below:
        return
    client = clients.admin(kafka)
    wanted = [TopicPartition(*place, offset) for place, offset in below.items()]
    for place, future in client.delete_records(wanted, request_timeout=timeout_s).items():
        try:
            answer_of(future, timeout_s)
        except KafkaException as error:
            raise BrokerUnavailable(
                f"records of {place.topic}[{place.partition}] below {place.offset} cannot be deleted: "
                f"{error.args[0].str()}"
            ) from error


def delete_topics(kafka: KafkaConfig, names: Collection[str]) -> dict[str, str]:
    """Delete topics; returns the reason for each topic that was not deleted."""
    client = clients.admin(kafka)
    failed = {}
    for topic, future in (client.delete_topics(list(names)) if names else {}).items():
        try:
            answer_of(future, _TIMEOUT_S)
        except KafkaException as error:
            failed[topic] = error.args[0].str()
    return failed


EVERY_S = 60.0
"""Time between two requests."""


class TopicWatch:
    """Knows the number of partitions of one topic, and how long brokers keep its records.

    As long as no broker answers, the previous answer stands.
    """

    def __init__(self, kafka: KafkaConfig, topic: str, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._kafka, self._topic, self._clock = kafka, topic, clock
        # One client for all requests, because the end of a client may wait for a name server.
        self._client: AdminClient | None = None
        self._settings: Future[Any] | None = None
        self._description: Future[Any] | None = None
        self._due_s = clock()
        self.retention_s = math.inf
        """Infinite if brokers keep records forever, before the first answer, and for a user who may not see it."""
        self.partitions = 0
        """0 before the first answer."""

    def poll(self) -> None:
        """Take the newest answers, and ask again if it is time to. Call it often."""
        if self._settings is not None and self._settings.done():
            with suppress(KafkaException):
                self.retention_s = retention_in(self._settings.result())
            self._settings = None
        if self._description is not None and self._description.done():
            with suppress(KafkaException):
                self.partitions = len(self._description.result().partitions)
            self._description = None
        if not (self._settings or self._description) and self._clock() >= self._due_s:
            self._due_s = self._clock() + EVERY_S
            self._client = self._client or clients.admin(self._kafka)
            self._settings = request_settings(self._client, self._topic)
            self._description = self._client.describe_topics(TopicCollection([self._topic]))[self._topic]
