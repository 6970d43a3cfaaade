"""Access rules of each role on the brokers: the least that it works with, from the catalogue and the description.

Reading and writing imply Describe. A rule that ends in a prefix covers this run alone: names of topics and groups begin
with the run and a dot, transactional ids with the run and a slash, and no other run's names begin so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollstream.pipeline.audit.pruning_plan import TOPICS as PRUNED
from rollstream.pipeline.deployment.description import (
    ARCHIVE,
    ENV,
    GATEWAY,
    GROUP,
    LABEL,
    NUMBER,
    PRUNE,
    expanded,
    role_of,
)
from rollstream.topics.catalogue import CATALOGUE, topic_name
from rollstream.topics.kafka.clients import FIRST_TOPIC, READERS

if TYPE_CHECKING:
    from rollstream.pipeline.config import RunConfig

TOPICS = "topics"
"""User of `rollstream topics apply`: it creates the topics and writes the first state of grouping."""
_PLACE = "{" + NUMBER + "}"


@dataclass(frozen=True)
class AccessRule:
    """Operations that a role may do on a resource of the brokers, named as in Strimzi's KafkaUser."""

    resource: Literal["topic", "group", "transactionalId"]
    name: str
    operations: tuple[str, ...]
    prefix: bool = False
    """Whether it covers every name that begins so."""


EVERYONE = (AccessRule("group", READERS, ("Describe",)), AccessRule("topic", FIRST_TOPIC, ("Describe",)))
"""Rules of every role. Without the second, clients work and brokers log a denial for each of them."""


def access_rules(config: "RunConfig", role: str) -> tuple[AccessRule, ...]:
    """Return the rules of a role, or of TOPICS, in a run of these settings, each resource once."""
    rules = _of_topics_apply(config) if role == TOPICS else _of_role(config, role)
    merged: dict[tuple[str, str, bool], AccessRule] = {}
    for rule in (*rules, *EVERYONE):
        key = (rule.resource, rule.name, rule.prefix)
        before = merged[key].operations if key in merged else ()
        operations = tuple(dict.fromkeys((*before, *rule.operations)))
        merged[key] = AccessRule(rule.resource, rule.name, operations, rule.prefix)
    return tuple(merged.values())


def _of_role(config: "RunConfig", name: str) -> Iterator[AccessRule]:
    role, run = role_of(name), config.run
    for spec in CATALOGUE:
        operations = ("Read",) * (spec.name in role.reads) + ("Write",) * (spec.name in role.writes)
        if name == PRUNE and spec.name in PRUNED:
            operations += ("Delete",)
        if operations:
            yield AccessRule("topic", topic_name(run, spec.name), operations)
    for template in role.groups:
        yield _named("group", template, config, ("Read",))
    for template in role.transactional_ids:
        yield _named("transactionalId", template, config, ("Write",))
    if name in (GROUP, LABEL, ARCHIVE, PRUNE):
        # They look how long brokers keep records; without it they go on without knowing.
        yield AccessRule("topic", topic_name(run, "rollouts"), ("DescribeConfigs",))
    if name in (ENV, GATEWAY, GROUP, PRUNE):
        # Flow control, drains and pruning look how far consumers have read.
        for reader in (GROUP, LABEL, ARCHIVE) if name == PRUNE else (LABEL,):
            for template in role_of(reader).groups:
                yield _named("group", template, config, ("Describe",))


def _of_topics_apply(config: "RunConfig") -> Iterator[AccessRule]:
    run = config.run
    yield AccessRule("topic", f"{run}.", ("Create", "Describe", "DescribeConfigs", "AlterConfigs"), prefix=True)
    for name, operations in (("journal", ("Read", "Write")), ("rollouts", ("Read",)), ("control", ("Read",))):
        yield AccessRule("topic", topic_name(run, name), operations)
    for template in role_of(GROUP).groups:
        yield _named("group", template, config, ("Read",))
    for template in role_of(GROUP).transactional_ids:
        yield _named("transactionalId", template, config, ("Write",))


def _named(
    resource: Literal["group", "transactionalId"], template: str, config: "RunConfig", operations: tuple[str, ...]
) -> AccessRule:
    """Return the rule of a template of names, which covers every number of a process where it has one."""
    before, place, _after = template.partition(_PLACE)
    return AccessRule(resource, expanded(before, config), operations, prefix=bool(place))
