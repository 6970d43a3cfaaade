"""Brokers of a chart, run by Strimzi: the cluster, its nodes, the topics of the catalogue, and its users."""

from typing import Any

from rollstream.infra.config import COMMON, BrokerConfig, replication
from rollstream.pipeline.deployment.access_rules import access_rules, users_of
from rollstream.pipeline.deployment.chart.context import RunChart
from rollstream.pipeline.deployment.chart.pods import IN_CHART, WITH_USERS
from rollstream.pipeline.deployment.chart.templates import Template, value, when
from rollstream.pipeline.deployment.container_settings import KAFKA_PORT
from rollstream.topics.wire.catalogue import CATALOGUE, TopicSpec, topic_name

SECURED_PORT = 9093
LISTENER = "roles"
_API = "kafka.strimzi.io/v1"
MECHANISM = "scram-sha-512"
SETTINGS = (
    "auto.create.topics.enable",
    "offsets.retention.minutes",
    "group.min.session.timeout.ms",
    "group.consumer.min.session.timeout.ms",
    "group.consumer.min.heartbeat.interval.ms",
    "group.consumer.session.timeout.ms",
    "group.consumer.heartbeat.interval.ms",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms",
    "log.cleaner.backoff.ms",
    "message.max.bytes",
    "replica.fetch.max.bytes",
    "socket.request.max.bytes",
)
"""Settings of our local brokers that the roles rely on; all other settings of local brokers only suit a laptop."""


def kafka_version() -> str:
    """Return the version of Kafka, which is also the version of our local brokers."""
    return BrokerConfig().image.rpartition(":")[2]


def bootstrap(chart: RunChart, port: int) -> str:
    """Return the address of the chart's brokers."""
    return f"{chart.cluster}-kafka-bootstrap:{port}"


def brokers_template(chart: RunChart) -> Template:
    """Return the cluster and its nodes."""
    return Template("Brokers, which Strimzi runs.", [when(IN_CHART, [_nodes(chart), _cluster(chart)])])


def topics_template(chart: RunChart) -> Template:
    """Return the topics, as Strimzi's topic operator expects them."""
    topics = [_topic(chart, spec) for spec in CATALOGUE]
    return Template("Topics of the run, from the catalogue.", [when(IN_CHART, topics)])


def users_template(chart: RunChart) -> Template:
    """Return the users of roles and of commands, each with the least access that it needs."""
    users = [_user(chart, name) for name in users_of(chart.config)]
    return Template(
        "Users of the brokers: one for each role, and those of commands, with the least access.",
        [when(WITH_USERS, users)],
    )


def _metadata(chart: RunChart, name: str) -> dict[str, Any]:
    return {"name": name, "labels": {"strimzi.io/cluster": chart.cluster, "rollstream/run": chart.name}}


def _nodes(chart: RunChart) -> dict[str, Any]:
    storage = {
        "id": 0,
        "type": "persistent-claim",
        "size": value("brokers.storage.size"),
        "class": when(".Values.brokers.storage.storageClassName", value("brokers.storage.storageClassName")),
        "deleteClaim": False,
        "kraftMetadata": "shared",
    }
    return {
        "apiVersion": _API,
        "kind": "KafkaNodePool",
        "metadata": _metadata(chart, f"{chart.name}-nodes"),
        "spec": {
            "replicas": value("brokers.count"),
            "roles": ["controller", "broker"],
            "storage": {"type": "jbod", "volumes": [storage]},
            "resources": value("brokers.resources"),
        },
    }


def _cluster(chart: RunChart) -> dict[str, Any]:
    settings: dict[str, Any] = {
        **replication(value("brokers.replicationFactor"), value("brokers.minInSyncReplicas")),
        **{key: COMMON[key] for key in SETTINGS},
        **dict(chart.config.broker.properties),
    }
    clients = [{"podSelector": {"matchLabels": chart.run_labels}}]
    listener: dict[str, Any] = {"name": LISTENER, "type": "internal", "networkPolicyPeers": clients}
    plain = {**listener, "port": KAFKA_PORT, "tls": False}
    secured = {**listener, "port": SECURED_PORT, "tls": True, "authentication": {"type": MECHANISM}}
    return {
        "apiVersion": _API,
        "kind": "Kafka",
        "metadata": _metadata(chart, chart.cluster),
        "spec": {
            "kafka": {
                "version": value("brokers.version"),
                "listeners": [
                    when("not .Values.brokers.security", [plain]),
                    when(".Values.brokers.security", [secured]),
                ],
                "authorization": when(".Values.brokers.security", {"type": "simple"}),
                "config": settings,
            },
            "entityOperator": {"topicOperator": {}, "userOperator": {}},
        },
    }


def _topic(chart: RunChart, spec: TopicSpec) -> dict[str, Any]:
    config: dict[str, Any] = spec.settings(chart.config.topics, chart.config.kafka)
    return {
        "apiVersion": _API,
        "kind": "KafkaTopic",
        # Deleting the release must not delete the log.
        "metadata": {
            **_metadata(chart, chart.object_name(spec.name)),
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "topicName": topic_name(chart.config.run, spec.name),
            "partitions": spec.partition_count(chart.config.topics),
            "replicas": value("brokers.replicationFactor"),
            "config": {**config, "min.insync.replicas": value("brokers.minInSyncReplicas")},
        },
    }


def _user(chart: RunChart, role: str) -> dict[str, Any]:
    acls = [
        {
            "resource": {
                "type": rule.resource,
                "name": rule.name,
                "patternType": "prefix" if rule.prefix else "literal",
            },
            "operations": list(rule.operations),
        }
        for rule in access_rules(chart.config, role)
    ]
    return {
        "apiVersion": _API,
        "kind": "KafkaUser",
        "metadata": _metadata(chart, chart.object_name(role)),
        "spec": {"authentication": {"type": MECHANISM}, "authorization": {"type": "simple", "acls": acls}},
    }
