"""`rollstream topics plan|apply|describe`: creates and changes a run's topics to match the catalogue, and shows them.

`apply` also writes generation 0 of the grouping state, so that any role can join a run whose topics exist.
"""

import argparse
import json
import logging
from collections.abc import Sequence

from rollstream.pipeline.command_line.command_parser import add_command, set_handler, wait_seconds
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import acls
from rollstream.topics.kafka import provisioning, topic_admin
from rollstream.topics.kafka.provisioning import MOVE_REPLICAS, TopicPlan
from rollstream.topics.kafka.topic_admin import delete_topics
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream topics`."""
    actions = parser.add_subparsers(dest="topics_command", metavar="COMMAND", required=True)
    for name, handler, summary in (
        ("plan", plan, "show what apply would create or change"),
        ("apply", apply, "create the run's topics, and correct their settings; safe to repeat"),
        ("describe", describe, "show the run's topics as they are on the broker"),
    ):
        action = add_command(actions, name, summary)
        set_handler(action, handler, json=True)
        if handler is apply:
            action.add_argument(
                "--wait",
                type=wait_seconds,
                metavar="S",
                help="wait up to S seconds until at least as many brokers answer as the topics have replicas",
            )
    acls.register(add_command(actions, "acls", "access rules of the topics: plan, apply"))


def plan(config: RunConfig, args: argparse.Namespace) -> int:
    """Show the changes `apply` would make."""
    plans = provisioning.plan(config.kafka, config.topics, config.run)
    _show(plans, args, ("create", "change", "keep"))
    return 0


def apply(config: RunConfig, args: argparse.Namespace) -> int:
    """Create and change topics, and show the changes made."""
    if args.wait is not None:
        topic_admin.await_brokers(config.kafka, config.topics.replication_factor, args.wait)
    _show(provision(config), args, ("created", "changed", "kept"))
    return 0


def describe(config: RunConfig, args: argparse.Namespace) -> int:
    """Show the topics that exist."""
    topics = provisioning.describe(config.kafka, config.run)
    if args.json:
        print(
            json.dumps(
                [
                    {
                        "topic": d.topic,
                        "id": d.topic_id,
                        "partitions": d.partitions,
                        "replicas": d.replicas,
                        "settings": dict(sorted(d.settings.items())),
                    }
                    for d in topics
                ]
            )
        )
    elif not topics:
        print(f"run {config.run} has no topics; create them with: rollstream topics apply --run {config.run}")
    else:
        shown = ("cleanup.policy", "retention.ms", "max.message.bytes")
        rows = [(d.topic, d.partitions, d.replicas, *(d.settings.get(key, "") for key in shown)) for d in topics]
        print(table(("topic", "partitions", "replicas", *shown), rows))
    return 0


def provision(config: RunConfig) -> list[TopicPlan]:
    """Create missing topics, the first grouping state and the record of the tokenizer; return the plan that was carried
    out. Idempotent."""
    from rollstream.consumers.grouping.core.configuration_marks import check_names
    from rollstream.consumers.grouping.core.plug_ins import load_plug_ins
    from rollstream.consumers.grouping.process.bootstrap import initialise
    from rollstream.consumers.models.tokenizer_log import put_tokenizer

    # The configuration of generation 0 stays on the log, so unknown names in it are refused before anything is created.
    check_names(config.grouping, load_plug_ins(config.grouper))
    plans = provisioning.apply(config.kafka, config.topics, config.run)
    initialise(config.kafka, config.run, config.grouping, config.grouper)
    put_tokenizer(config.kafka, config.run, config.learner.pretrained)
    return plans


def remove(config: RunConfig) -> None:
    """Delete the run's topics, from a broker that this process did not start."""
    names = [d.topic for d in provisioning.describe(config.kafka, config.run)]
    for topic, error in delete_topics(config.kafka, names).items():
        event(logger, "topic_not_deleted", level=logging.WARNING, topic=topic, error=error)


def _show(plans: Sequence[TopicPlan], args: argparse.Namespace, words: tuple[str, str, str]) -> None:
    create, change, keep = words

    def word(p: TopicPlan) -> str:
        return create if p.create else change if p.changes or p.subjects else keep

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
                        "replicas": p.replicas,
                        "subjects": p.subjects,
                    }
                    for p in plans
                ]
            )
        )
        return

    def detail(p: TopicPlan) -> str:
        changes = (f"{key}: {now or '-'} -> {wanted}" for key, (now, wanted) in p.changes.items())
        replicas = (f"replicas are {p.replicas[0]}, not {p.replicas[1]}",) if p.replicas else ()
        return "; ".join((*changes, *(f"schemas of {name}" for name in p.subjects), *replicas))

    print(
        table(
            ("topic", "partitions", "action", "settings"),
            [(p.topic, p.partitions, word(p), detail(p)) for p in plans],
        )
    )
    if any(p.replicas for p in plans):
        print(f"\nreplicas differ from topics.replication_factor: {MOVE_REPLICAS}")
