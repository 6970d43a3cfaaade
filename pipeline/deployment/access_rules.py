"""Derives each role's access rules, which grant only what it needs, from the topic catalogue and the description.

`rollstream topics acls`, the users of a chart, `rollstream doctor` and docs/security.md are made from these rules. Read
and Write imply Describe. No rule covers a name of another run: topics are named one by one, because topics of run `a.b`
begin like topics of run `a`. A prefix of groups ends in `.turn-` or `.filler-`, which no run's name contains; a prefix
of transactional ids begins with the name of the run and a slash, which no run's name contains either.
`topics.prefix_rules` gives this up for a run whose users share a principal, because brokers may limit the rules.

A plan compares them with the brokers' rules. Only rules of the run's own principals about the run's own names are ever
removed. Other rules that reach the run are only shown. So are rules of roles that the run does not have, and rules that
let pruning see a group of the user's own.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollstream.pipeline.deployment.description import (
    ARCHIVE,
    ENV,
    FILL,
    GATEWAY,
    GROUP,
    LABEL,
    NUMBER,
    PRUNE,
    ROLES,
    counts,
    expanded,
    role_of,
)
from rollstream.topics.kafka.access_control import AccessEntry
from rollstream.topics.kafka.clients import FIRST_TOPIC, READERS
from rollstream.topics.wire.catalogue import CATALOGUE, PRUNED, TOOLS, topic_name

if TYPE_CHECKING:
    from rollstream.pipeline.config import RunConfig

TOPICS = "topics"
"""User of `rollstream topics apply`, which creates the topics and writes the first state of grouping."""
AUDIT = "audit"
"""User of the commands that only read, such as `ledger`, `verify`, `lineage`, `top`, `show`, `replay` and `cat`."""
OPERATE = "operate"
"""User of the commands that change a run, such as `topics apply`, `exclude`, `dlq redrive` and `stop`."""
TOOL_USERS = (TOPICS, AUDIT, OPERATE)
"""Users that are not a role of a run."""
USERS = (*(role.name for role in ROLES), *TOOL_USERS)
"""Users that a run may have."""
_PLACE = "{" + NUMBER + "}"


@dataclass(frozen=True)
class AccessRule:
    """Operations that a role may perform on a resource of the brokers, named as in Strimzi's KafkaUser."""

    resource: Literal["topic", "group", "transactionalId"]
    name: str
    operations: tuple[str, ...]
    prefix: bool = False
    """Whether it covers every name that begins with `name`."""


EVERYONE = (AccessRule("group", READERS, ("Describe",)), AccessRule("topic", FIRST_TOPIC, ("Describe",)))
"""Rules of every role. Without the second rule, clients work, but brokers log a denial for each client."""


def users_of(config: "RunConfig") -> tuple[str, ...]:
    """Return the users of a run with these settings: its roles, the tools that may run with them, and TOOL_USERS."""
    return (*dict.fromkeys((*counts(config), ARCHIVE, PRUNE)), *TOOL_USERS)


def access_rules(config: "RunConfig", user: str) -> tuple[AccessRule, ...]:
    """Return the rules of a role, or of one of TOOL_USERS, in a run with these settings, each resource once."""
    rules = _OF_TOOLS[user](config) if user in _OF_TOOLS else _of_role(config, user)
    merged: dict[tuple[str, str, bool], AccessRule] = {}
    for rule in (*rules, *EVERYONE):
        key = (rule.resource, rule.name, rule.prefix)
        before = merged[key].operations if key in merged else ()
        operations = tuple(dict.fromkeys((*before, *rule.operations)))
        merged[key] = AccessRule(rule.resource, rule.name, operations, rule.prefix)
    return tuple(merged.values())


def granted_rules(config: "RunConfig", user: str) -> tuple[AccessRule, ...]:
    """Return the rules that `topics acls` grants a user: those of its role, or all of the run with
    topics.prefix_rules."""
    if not config.topics.prefix_rules:
        return access_rules(config, user)
    on_topics = ("Read", "Write", "Create", "Delete", "DescribeConfigs", "AlterConfigs")
    return (
        AccessRule("topic", f"{config.run}.", on_topics, prefix=True),
        AccessRule("group", f"{config.run}.", ("Read",), prefix=True),
        AccessRule("transactionalId", f"{config.run}/", ("Write",), prefix=True),
        *EVERYONE,
    )


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
        # Grouping reads how long brokers keep `rollouts`, for its metric `seconds_to_retention`. `rollstream doctor`
        # reads it, too, as the user under which it runs. Without this right, both assume that records are kept forever.
        yield AccessRule("topic", topic_name(run, "rollouts"), ("DescribeConfigs",))
    if name in (ENV, GATEWAY, GROUP, PRUNE):
        # Flow control, drains and pruning check how far consumers have read.
        for reader in (GROUP, LABEL, ARCHIVE) if name == PRUNE else (LABEL,):
            for template in role_of(reader).groups:
                yield _named("group", template, config, ("Describe",))
    if name == PRUNE:
        yield _of_fillers(config)


def _of_topics_apply(config: "RunConfig") -> Iterator[AccessRule]:
    run = config.run
    for spec in CATALOGUE:
        yield AccessRule("topic", topic_name(run, spec.name), ("Create", "Describe", "DescribeConfigs", "AlterConfigs"))
    written = (("journal", ("Read", "Write")), ("tokenizers", ("Read", "Write")))
    for name, operations in (*written, ("rollouts", ("Read",)), ("control", ("Read",))):
        yield AccessRule("topic", topic_name(run, name), operations)
    for template in role_of(GROUP).groups:
        yield _named("group", template, config, ("Read",))
    for template in role_of(GROUP).transactional_ids:
        yield _named("transactionalId", template, config, ("Write",))


def _of_fillers(config: "RunConfig") -> AccessRule:
    """Return the rule that shows how far all fillers have read, including those of learners, whose names are free.

    Brokers list only the groups that a user may describe, so pruning would not know of others, and delete their
    records.
    """
    (template,) = role_of(FILL).groups
    return AccessRule("group", template.partition("{fill.name}")[0].format(run=config.run), ("Describe",), prefix=True)


def _of_audit(config: "RunConfig") -> Iterator[AccessRule]:
    yield _of_fillers(config)
    for spec in CATALOGUE:
        yield AccessRule("topic", topic_name(config.run, spec.name), ("Read", "DescribeConfigs"))
    for role in ROLES:
        for template in role.groups:
            yield _named("group", template, config, ("Describe",))
        for template in role.transactional_ids:
            # With this right the tools can name the transaction that holds back readers.
            yield _named("transactionalId", template, config, ("Describe",))


def _of_operators(config: "RunConfig") -> Iterator[AccessRule]:
    yield from _of_audit(config)
    yield from _of_topics_apply(config)
    for spec in CATALOGUE:
        operations = ("Write",) * (TOOLS in spec.writers) + ("Delete",) * (spec.name in PRUNED)
        if operations:
            yield AccessRule("topic", topic_name(config.run, spec.name), operations)
    for role in ROLES:
        for template in role.groups:
            yield _named("group", template, config, ("Read",))
    # Operators take over transactional ids, to fence processes and to move positions.
    yield AccessRule("transactionalId", f"{config.run}/", ("Write",), prefix=True)


_OF_TOOLS: dict[str, Callable[["RunConfig"], Iterator[AccessRule]]] = {
    TOPICS: _of_topics_apply,
    AUDIT: _of_audit,
    OPERATE: _of_operators,
}


def _named(
    resource: Literal["group", "transactionalId"], template: str, config: "RunConfig", operations: tuple[str, ...]
) -> AccessRule:
    """Return the rule for a template of names; it covers all process numbers if the template contains a number."""
    before, place, _after = template.partition(_PLACE)
    return AccessRule(resource, expanded(before, config), operations, prefix=bool(place))


@dataclass(frozen=True)
class AccessPlan:
    """Differences between the rules that a run needs and the rules on the brokers."""

    missing: tuple[AccessEntry, ...]
    """Rules to add."""
    surplus: tuple[AccessEntry, ...]
    """Rules to remove: they belong to the run's principals and name the run's resources, but no role needs them."""
    present: tuple[AccessEntry, ...]
    """Rules that are needed and present."""
    others: tuple[AccessEntry, ...]
    """Rules to leave: those of other principals, rules about every topic and denials that reach the run's topics; rules
    of roles that the run does not have; and rules that let pruning see a consumer group of the user's own."""


def principal(config: "RunConfig", user: str) -> str:
    """Return the principal of a user of the run on the brokers, according to topics.principal."""
    return config.topics.principal.replace("{run}", config.run).replace("{role}", user)


def sharing(config: "RunConfig", user: str) -> tuple[str, ...]:
    """Return the users of a run that have the principal of this user: itself, and others if topics.principal lacks
    {role}."""
    theirs = principal(config, user)
    return tuple(dict.fromkeys((user, *(other for other in users_of(config) if principal(config, other) == theirs))))


def wanted(config: "RunConfig", users: Iterable[str]) -> frozenset[AccessEntry]:
    """Return the rules that these users of a run need."""
    return frozenset(
        AccessEntry(
            principal=principal(config, user),
            resource=rule.resource,
            name=rule.name,
            prefix=rule.prefix,
            operation=operation,
        )
        for user in users
        for rule in granted_rules(config, user)
        for operation in rule.operations
    )


def compare(config: "RunConfig", users: Iterable[str], there: Iterable[AccessEntry]) -> AccessPlan:
    """Return the differences for these users of a run, given every rule on the brokers.

    Rules of `users` are surplus if no user with the same principal could need them. Rules of roles that the run does
    not have are never surplus, unless `users` names the role: such a role may have been started by itself.
    """
    users, there = frozenset(users), frozenset(there)
    needed, of_users = wanted(config, users), wanted(config, users_of(config))
    of_absent = wanted(config, USERS) - needed - of_users
    ours, running = ({principal(config, user) for user in some} for some in (users, users_of(config)))
    of_run = {principal(config, user) for user in USERS}
    own = {
        entry for entry in there if entry.principal in of_run and entry.allow and names_something_of(config.run, entry)
    }
    unneeded = own - needed - of_users
    kept = {entry for entry in unneeded if entry in of_absent or _shows_a_group_to_pruning(config, entry)}
    surplus = {entry for entry in unneeded - kept if entry.principal in ours}
    kept |= {entry for entry in unneeded - surplus if entry.principal not in running}
    topics = [topic_name(config.run, spec.name) for spec in CATALOGUE]
    others = kept | {entry for entry in there - needed - own if any(entry.covers("topic", topic) for topic in topics)}
    return AccessPlan(
        *(tuple(sorted(entries)) for entries in (needed - there, surplus, needed & there, others)),
    )


def _shows_a_group_to_pruning(config: "RunConfig", entry: AccessEntry) -> bool:
    """Whether a rule lets `prune` or `operate` see a consumer group.

    The user grants such rules for groups of their own. Without them, pruning deletes records that these groups have not
    read.
    """
    if config.topics.prefix_rules:
        return False  # Its rule covers every such group.
    pruning = (principal(config, user) for user in (PRUNE, OPERATE))
    return entry.resource == "group" and entry.operation == "Describe" and entry.principal in pruning


def names_something_of(run: str, entry: AccessEntry) -> bool:
    """Whether a rule names a topic, group or transactional id of this run, and of no other run.

    After the run's name, names of topics and groups contain no dot except in `.turn-`, so `a.b.rollouts` belongs to run
    `a.b`.
    """
    if entry.resource == "transactionalId":
        return entry.name.startswith(f"{run}/")
    if entry.resource == "cluster" or not entry.name.startswith(f"{run}."):
        return False
    rest = entry.name.removeprefix(f"{run}.")
    return re.fullmatch(r"[^.]*(\.turn-[^.]*)?", rest) is not None
