"""Compares the access rules that a run needs with the rules on the brokers. It connects to no broker.

Only rules of the run's own principals about the run's own names are ever removed. Other rules that reach the run are
only shown. So are rules of roles that the run does not have, and rules that let pruning see a group of the user's own.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollstream.pipeline.deployment.access_rules import OPERATE, USERS, access_rules, users_of
from rollstream.pipeline.deployment.description import PRUNE
from rollstream.topics.kafka.access_control import AccessEntry
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

if TYPE_CHECKING:
    from rollstream.pipeline.config import RunConfig


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
        for rule in access_rules(config, user)
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
