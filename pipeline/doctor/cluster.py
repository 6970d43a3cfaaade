"""Checks the versions of a run's brokers, and compares the run's topics with the catalogue."""

from collections.abc import Iterator
from importlib.metadata import version

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.doctor.findings import Finding
from rollstream.topics.errors import ConfigurationError, RollstreamError, TopicError
from rollstream.topics.kafka import granted_permissions, provisioning
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

_OLDEST_BROKER = (4, 0)


def check_versions(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding on the versions of the client and the brokers."""
    ours = f"rollstream {version('rollstream')}, librdkafka {granted_permissions.client_version()}"
    try:
        broker = granted_permissions.broker_version(config.kafka)
    except ConfigurationError:
        yield Finding(
            check="versions", level="note", text=f"{ours}; the brokers' version cannot be determined from here"
        )
        return
    older = tuple(map(int, broker.split("."))) < _OLDEST_BROKER
    yield Finding(
        check="versions",
        level="fault" if older else "ok",
        text=f"{ours}, brokers {broker} or newer",
        remedy="upgrade the brokers to Kafka 4.0 or newer" if older else "",
    )


def check_topics(config: RunConfig, flags: str = "") -> Iterator[Finding]:
    """Yield a finding for each topic that is missing or differs from the catalogue, or one finding if all match.

    The commands of the remedies end in `flags`.
    """
    try:
        plans = provisioning.plan(config.kafka, config.topics, config.run)
    except TopicError as error:  # a number of partitions
        added = list(_check_partitions(config, flags))
        yield from added or [Finding(check="topics", level="fault", text=str(error), remedy="set topics.partitions")]
        return
    except RollstreamError as error:
        yield Finding(
            check="topics",
            level="note",
            text=f"settings of topics were not checked: {error}",
            remedy="run the check as the user audit or operate, which may see them",
        )
        return
    differing = [plan for plan in plans if plan.needed]
    for plan in differing:
        changes = "; ".join(f"{key} is {now or 'unset'}, not {right}" for key, (now, right) in plan.changes.items())
        text = f"topic {plan.topic} is missing" if plan.create else f"topic {plan.topic}: {changes or 'lacks schemas'}"
        yield Finding(check="topics", level="fault", text=text, remedy=f"rollstream topics apply{flags}")
    for plan in plans:
        if plan.replicas:
            now, wanted = plan.replicas
            yield Finding(
                check="topics",
                level="fault" if now < wanted else "note",
                text=f"topic {plan.topic}: replicas of each partition are {now}, not {wanted}",
                remedy=provisioning.MOVE_REPLICAS,
            )
    if not differing and not any(plan.replicas for plan in plans):
        yield Finding(check="topics", level="ok", text=f"{len(plans)} topics match the catalogue")


def _check_partitions(config: RunConfig, flags: str) -> Iterator[Finding]:
    """Yield a finding for each topic to which partitions were added: those of a run have as many as its journal."""
    there = {
        description.topic: description.partitions for description in provisioning.describe(config.kafka, config.run)
    }
    right = there.get(topic_name(config.run, "journal"), config.topics.partitions)
    for topic in (topic_name(config.run, spec.name) for spec in CATALOGUE if spec.partitions == "P"):
        if there.get(topic, right) != right:
            yield Finding(
                check="topics",
                level="fault",
                text=f"topic {topic} has {there[topic]} partitions, and the journal {right}: keys have moved, and "
                "nothing groups what lies in the others",
                remedy=f"brokers cannot remove partitions, so rollstream fork{flags} --into NAME --partitions "
                f"{there[topic]}",
            )
