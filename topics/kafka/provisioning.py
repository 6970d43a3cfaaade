"""Creates a run's topics as the catalogue specifies. Applying twice gives the same result as applying once.

`plan` compares; `apply` creates missing topics and corrects settings. The number of partitions never changes, because
keys would move. A different number of replicas is reported only, because moving replicas is the operators' decision.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import BrokerUnavailable, TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.client_calls import answer_of, denial, is_fenced, retrying
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

_TIMEOUT_S = 30.0
_ANSWER_S = 5.0
_FENCED_S = 0.2
"""Pause before topics that fenced brokers refused are created again."""
_REGISTRY_TIMEOUT_S = 60.0
"""Timeout of a request to the schema registry, which answers its first request slowly."""


MOVE_REPLICAS = (
    "change the replicas with kafka-reassign-partitions, or set topics.replication_factor to the number that is there"
)
"""The remedy for a different number of replicas."""


@dataclass(frozen=True)
class TopicPlan:
    """Changes that one topic needs: creation, `changes` of settings {key: (now, wanted)}, and the subjects whose
    schemas the schema registry lacks. These are false or empty if the topic is up to date; `settings` are all that the
    topic shall have."""

    topic: str
    partitions: int
    settings: dict[str, str]
    create: bool = False
    changes: dict[str, tuple[str, str]] = field(default_factory=dict)
    subjects: tuple[str, ...] = ()
    replicas: tuple[int, int] | None = None
    """Replicas of each partition (now, wanted) if these differ. `apply` leaves them; MOVE_REPLICAS is the remedy."""

    @property
    def needed(self) -> bool:
        return self.create or bool(self.changes) or bool(self.subjects)


@dataclass(frozen=True)
class TopicDescription:
    """A topic as it is on the broker."""

    topic: str
    topic_id: str
    partitions: int
    settings: dict[str, str]
    replicas: int
    """Replicas of the partition that has the fewest."""


def plan(
    kafka: KafkaConfig, config: TopicsConfig, run: str, settings: Mapping[str, str] = MappingProxyType({})
) -> list[TopicPlan]:
    """Return what `apply` would do. Raises TopicError if numbers of partitions differ, BrokerUnavailable if no broker
    answers, and RegistryUnavailable or SchemaRefused for a configured schema registry."""
    return _with_subjects(kafka, run, _plan_topics(kafka, config, run, settings), register=False)


def _with_subjects(kafka: KafkaConfig, run: str, plans: list[TopicPlan], *, register: bool) -> list[TopicPlan]:
    """Add the subjects that lack schemas to the plans of their topics; `register` also registers these schemas."""
    if not kafka.registry.url:
        return plans
    from rollstream.topics.kafka.registry.client import RegistryClient, subjects_of

    lacking: dict[str, list[str]] = {}
    with RegistryClient(kafka.registry, _REGISTRY_TIMEOUT_S) as client:
        for subject in subjects_of(kafka.registry, run):
            if client.register(subject) if register else client.missing(subject):
                lacking.setdefault(subject.topic, []).append(subject.name)
    return [replace(plan, subjects=tuple(lacking.get(plan.topic, ()))) for plan in plans]


def _plan_topics(kafka: KafkaConfig, config: TopicsConfig, run: str, settings: Mapping[str, str]) -> list[TopicPlan]:
    existing = {d.topic: d for d in describe(kafka, run)}
    plans = []
    for spec in CATALOGUE:
        topic = topic_name(run, spec.name)
        topic_settings, count = {**spec.settings(config, kafka), **settings}, spec.partition_count(config)
        current = existing.get(topic)
        if current is None:
            plans.append(TopicPlan(topic, count, topic_settings, create=True))
            continue
        if current.partitions != count:
            raise TopicError(
                f"topic {topic} has {current.partitions} partitions, the configuration says {count}; the number is "
                f"fixed for a run: set it back, or start a run with another name"
            )
        changes = {
            k: (current.settings.get(k, ""), v) for k, v in topic_settings.items() if current.settings.get(k) != v
        }
        # With -1, brokers choose the number when they create a topic.
        same = config.replication_factor in (current.replicas, -1)
        replicas = None if same else (current.replicas, config.replication_factor)
        plans.append(TopicPlan(topic, current.partitions, topic_settings, changes=changes, replicas=replicas))
    return plans


def apply(
    kafka: KafkaConfig, config: TopicsConfig, run: str, settings: Mapping[str, str] = MappingProxyType({})
) -> list[TopicPlan]:
    """Create topics, correct their settings, and register their schemas if there is a registry; return the plan carried
    out. Safe to run repeatedly or concurrently. Raises as `plan` does.

    `settings` are Kafka topic settings that override the catalogue for every topic. A later call without them restores
    the values of the catalogue, and leaves settings that a topic does not have in the catalogue.
    """
    # First, so that an incompatible schema is refused before anything is created.
    plans = _with_subjects(kafka, run, _plan_topics(kafka, config, run, settings), register=True)
    client = clients.admin(kafka)
    new = [
        NewTopic(p.topic, num_partitions=p.partitions, replication_factor=config.replication_factor, config=p.settings)
        for p in plans
        if p.create
    ]
    _create(client, new)
    _await_leaders(kafka, {p.topic for p in plans if p.create})
    changed = [
        ConfigResource(
            ResourceType.TOPIC,
            p.topic,
            incremental_configs=[
                ConfigEntry(k, value, incremental_operation=AlterConfigOpType.SET)
                for k, (_now, value) in p.changes.items()
            ],
        )
        for p in plans
        if p.changes
    ]
    for resource, future in (client.incremental_alter_configs(changed) if changed else {}).items():
        try:
            answer_of(future, _TIMEOUT_S)
        except KafkaException as error:
            raise TopicError(f"settings of topic {resource.name} cannot be changed: {error.args[0].str()}") from error
    deadline = time.monotonic() + _TIMEOUT_S
    # The controller acknowledges a change; the broker that reports settings may lag behind it.
    while changed and (late := sorted(p.topic for p in _plan_topics(kafka, config, run, settings) if p.changes)):
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"settings of topics {late} were changed, but the broker does not show it after {_TIMEOUT_S:g} s; "
                f"another program sets them, or the broker lags behind its controller: run `rollstream topics apply` "
                f"again"
            )
        time.sleep(0.02)
    return plans


def unset(kafka: KafkaConfig, run: str, names: Iterable[str]) -> None:
    """Remove Kafka settings from every topic of a run, so that the settings of the brokers apply again.

    Raises TopicError or BrokerUnavailable.
    """
    entries = [ConfigEntry(name, None, incremental_operation=AlterConfigOpType.DELETE) for name in names]
    topics = [description.topic for description in describe(kafka, run)]
    resources = [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries) for topic in topics]
    client = clients.admin(kafka)  # its answers end with it
    for resource, future in (client.incremental_alter_configs(resources) if resources else {}).items():
        try:
            answer_of(future, _TIMEOUT_S)
        except KafkaException as error:
            raise TopicError(f"settings of topic {resource.name} cannot be removed: {error.args[0].str()}") from error


def _listed(client: AdminClient) -> ClusterMetadata:
    """Return the brokers and topics that a client knows. Raises BrokerUnavailable."""
    return retrying(partial(client.list_topics, timeout=_ANSWER_S), "listing the brokers", _TIMEOUT_S)


def _create(client: AdminClient, topics: Iterable[NewTopic]) -> None:
    """Create topics that are missing, and wait for brokers that the controller has fenced: a busy broker whose
    heartbeats are late is fenced until the next one."""
    deadline = time.monotonic() + _TIMEOUT_S
    missing = {topic.topic: topic for topic in topics}
    while missing:
        refused = {}
        for name, future in client.create_topics(list(missing.values()), operation_timeout=_TIMEOUT_S).items():
            try:
                answer_of(future, _TIMEOUT_S)
            except KafkaException as error:
                refusal: KafkaError = error.args[0]
                if refusal.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    continue
                if not is_fenced(refusal):
                    raise TopicError(f"topic {name} cannot be created: {refusal.str()}") from error
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"topic {name} cannot be created: {refusal.str()} This lasted {_TIMEOUT_S:g} s: the machine "
                        "was paused or is overloaded, or brokers are starting; try again, and read the brokers' logs "
                        "if it stays so"
                    ) from error
                refused[name] = missing[name]
        missing = refused
        time.sleep(_FENCED_S if missing else 0)


def _await_leaders(kafka: KafkaConfig, created: set[str]) -> None:
    """Wait until every broker knows the topics: the controller acknowledges a creation, and brokers may lag behind."""
    if not created:
        return
    deadline = time.monotonic() + _TIMEOUT_S
    # While every broker is fenced, none is listed, and a client may never list one again (see `stranded_clients`).
    while not (brokers := _listed(client := clients.admin(kafka)).brokers):
        clients.check_broker(kafka, max(0.0, deadline - time.monotonic()))
    for broker in brokers.values():
        # A client with one address asks that broker; a client with several asks any.
        broker_client = clients.admin(replace(kafka, bootstrap_servers=f"{broker.host}:{broker.port}"))
        missing = created
        while missing:
            try:
                known = broker_client.list_topics(timeout=_ANSWER_S).topics
            except KafkaException:
                # A broker that has died is listed until its session ends.
                if broker.id not in _listed(client).brokers:
                    break
                known = {}
            missing = {t for t in missing if t not in known or any(p.leader < 0 for p in known[t].partitions.values())}
            if missing and time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"topics {sorted(missing)} were created, but after {_TIMEOUT_S:g} s broker "
                    f"{broker.host}:{broker.port} does not answer or knows no leader for them; apply them again"
                )
            time.sleep(0.02 if missing else 0)


def describe(kafka: KafkaConfig, run: str) -> list[TopicDescription]:
    """Return the existing topics of a run, with their settings."""
    clients.check_broker(kafka)
    client = clients.admin(kafka)
    try:
        present = client.list_topics(timeout=_TIMEOUT_S).topics
        topics = [topic_name(run, spec.name) for spec in CATALOGUE]
        names = [name for name in topics if name in present]
        _check_hidden(client, [name for name in topics if name not in present])
        if not names:
            return []
        ids = topic_admin.topic_ids(kafka, names)
        descriptions = []
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        for resource, future in client.describe_configs(resources).items():
            settings = {entry.name: entry.value for entry in answer_of(future, _TIMEOUT_S).values()}
            name, partitions = resource.name, present[resource.name].partitions
            replicas = min((len(partition.replicas) for partition in partitions.values()), default=0)
            descriptions.append(TopicDescription(name, ids[name], len(partitions), settings, replicas))
        return descriptions
    except KafkaException as error:
        doing = f"describing topics of run {run}"
        raise denial(error.args[0], doing) or BrokerUnavailable(f"{doing}: {error.args[0].str()}") from error


def _check_hidden(client: AdminClient, names: list[str]) -> None:
    """Raise KafkaException if a topic is not absent but hidden from this client's user, or if no broker says so."""
    for future in (client.describe_topics(TopicCollection(names)) if names else {}).values():
        try:
            answer_of(future, _TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._TIMED_OUT):
                raise
