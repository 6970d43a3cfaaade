"""`rollstream topics plan|apply|describe`: brings a run's topics to what the catalogue says, and shows them.

`apply` also writes generation 0 of the grouping state, so that a run whose topics exist can be joined by any role.
"""

import argparse
import json
import logging
from collections.abc import Sequence

from confluent_kafka import KafkaException

from pipeline.config import RunConfig
from pipeline.tables import table
from topics import clients, provisioning
from topics.logs import event
from topics.provisioning import TopicPlan

logger = logging.getLogger(__name__)
_TIMEOUT_S = 30.0


def plan(config: RunConfig, args: argparse.Namespace) -> int:
    """Show what `apply` would do."""
    plans = provisioning.plan(config.kafka, config.topics, config.run)
    _show(plans, args, ("create", "change", "keep"))
    return 0


def apply(config: RunConfig, args: argparse.Namespace) -> int:
    """Do it, and say what was done."""
    _show(provision(config), args, ("created", "changed", "kept"))
    return 0


def describe(config: RunConfig, args: argparse.Namespace) -> int:
    """Show the topics that exist."""
    found = provisioning.describe(config.kafka, config.run)
    if args.json:
        print(
            json.dumps(
                [
                    {
                        "topic": d.topic,
                        "id": d.topic_id,
                        "partitions": d.partitions,
                        "settings": dict(sorted(d.settings.items())),
                    }
                    for d in found
                ]
            )
        )
    elif not found:
        print(f"run {config.run} has no topics; create them with: rollstream topics apply --run {config.run}")
    else:
        shown = ("cleanup.policy", "retention.ms", "max.message.bytes")
        rows = [(d.topic, d.partitions, *(d.settings.get(key, "") for key in shown)) for d in found]
        print(table(("topic", "partitions", *shown), rows))
    return 0


def provision(config: RunConfig) -> list[TopicPlan]:
    """Create what is missing, topics and first grouping state; returns the plan that was carried out. Idempotent."""
    from consumers.grouping.bootstrap import initialise
    from consumers.grouping.configuring import check_names
    from consumers.grouping.makers import makers_of

    # What generation 0 names stays in the log: a name nobody knows is refused before anything is created.
    check_names(config.grouping, makers_of(config.grouper.makers))
    plans = provisioning.apply(config.kafka, config.topics, config.run)
    initialise(config.kafka, config.run, config.grouping, config.grouper)
    return plans


def remove(config: RunConfig) -> None:
    """Delete the run's topics from a broker that is not ours."""
    client = clients.admin(config.kafka)
    names = [d.topic for d in provisioning.describe(config.kafka, config.run)]
    for topic, future in (client.delete_topics(names) if names else {}).items():
        try:
            future.result(_TIMEOUT_S)
        except KafkaException as error:
            event(logger, "topic_not_deleted", level=logging.WARNING, topic=topic, error=error.args[0].str())


def _show(plans: Sequence[TopicPlan], args: argparse.Namespace, words: tuple[str, str, str]) -> None:
    create, change, keep = words

    def word(p: TopicPlan) -> str:
        return create if p.create else change if p.changes else keep

    if args.json:
        print(
            json.dumps(
                [
                    {
                        "topic": p.topic,
                        "action": word(p),
                        "partitions": p.partitions,
                        "settings": p.settings,
                        "changes": p.changes,
                    }
                    for p in plans
                ]
            )
        )
        return
    details = ("; ".join(f"{key}: {now or '-'} -> {wanted}" for key, (now, wanted) in p.changes.items()) for p in plans)
    print(
        table(
            ("topic", "partitions", "action", "settings"),
            [(p.topic, p.partitions, word(p), detail) for p, detail in zip(plans, details, strict=True)],
        )
    )
