"""Compares the rights of this client's user with the rights that a role needs, and names missing and excess rights.

A rule for a prefix is checked with the name of process 0.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import AccessRule, access_rules, granted_rules, sharing
from rollstream.pipeline.deployment.description import ROLES, expanded
from rollstream.pipeline.doctor.findings import Finding
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import access_control
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

_IMPLIED = {"Read": {"Describe"}, "Write": {"Describe"}, "Delete": {"Describe"}, "AlterConfigs": {"DescribeConfigs"}}
_EVERYTHING = {"Read", "Write", "Alter", "Delete", "AlterConfigs"}
"""Operations on a topic that no user of a run has all at once."""
_CHECK = "permissions"


@dataclass(frozen=True)
class _Role:
    """A role whose user is checked."""

    name: str
    needed: tuple[AccessRule, ...]
    allowed: tuple[AccessRule, ...]
    """Rules of all users with its principal."""
    flags: str

    @property
    def grant(self) -> str:
        """The remedy for a right that the user lacks."""
        return f"rollstream topics acls apply --role {self.name}{self.flags}"

    @property
    def withdraw(self) -> str:
        """The remedy for a right that the user should not have."""
        return f"remove the rule; this command shows it: rollstream topics acls plan{self.flags}"


def check_permissions(config: RunConfig, role: str, flags: str = "") -> Iterator[Finding]:
    """Yield findings on rights that the user of these settings lacks for a role, and on rights that neither the role
    nor others with its principal need. The commands of the remedies end in `flags`."""
    topics = access_control.topic_operations(config.kafka, [topic_name(config.run, spec.name) for spec in CATALOGUE])
    if any((operations or frozenset()) >= _EVERYTHING for operations in topics.values()):
        yield Finding(
            check=_CHECK,
            level="note",
            text="this user may do everything: the brokers have no authorizer, or it is a super user",
            remedy=f"give {role} a user of its own on brokers with an authorizer: rollstream topics acls apply{flags}",
        )
        return
    users = sharing(config, role)
    allowed = tuple(rule for user in users for rule in granted_rules(config, user))
    checked = _Role(role, access_rules(config, role), allowed, flags)
    faults = [
        *_compared("topic", topics, checked),
        *_compared("group", access_control.group_operations(config.kafka, _names(config, "groups")), checked),
        *_transactional_ids(config, checked),
        *_of_cluster(config, role),
    ]
    yield from faults
    if not [finding for finding in faults if finding.level == "fault"]:
        needs = f"{role} needs" if len(users) == 1 else f"{role} and the other users with its principal need"
        yield Finding(check=_CHECK, level="ok", text=f"this user may do what {needs}, and nothing else in the run")


def _names(config: RunConfig, kind: str) -> list[str]:
    """Return the consumer groups or transactional ids of all roles of a run, with the names of process 0."""
    return list(dict.fromkeys(expanded(template, config) for role in ROLES for template in getattr(role, kind)))


def _needed(rules: Iterable[AccessRule], resource: str, name: str) -> set[str]:
    """Return the operations that rules allow on a resource, including implied operations."""
    operations: set[str] = set()
    for rule in rules:
        if rule.resource == resource and (rule.name == name or (rule.prefix and name.startswith(rule.name))):
            operations |= set(rule.operations)
    return operations.union(*(_IMPLIED.get(operation, set()) for operation in operations))


def _compared(resource: str, may: Mapping[str, frozenset[str] | None], role: _Role) -> Iterator[Finding]:
    for name, operations in may.items():
        if operations is None:
            continue  # a topic that does not exist is a finding of its own
        # The brokers never list Create for a topic that exists.
        lacking = _needed(role.needed, resource, name) - operations - {"Create"}
        beyond = operations - _needed(role.allowed, resource, name)
        if lacking:
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"{role.name} needs {_listed(lacking)} on {resource} {name}, which this user does not have",
                remedy=role.grant,
            )
        if beyond:
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"this user may {_listed(beyond)} on {resource} {name}, which {role.name} does not need",
                remedy=role.withdraw,
            )


def _transactional_ids(config: RunConfig, role: _Role) -> Iterator[Finding]:
    try:
        writable = access_control.writable_ids(config.kafka, _names(config, "transactional_ids"))
    except ConfigurationError as error:
        yield Finding(check=_CHECK, level="note", text=f"transactional ids were not checked: {error}")
        return
    for name, may in writable.items():
        if "Write" in _needed(role.needed, "transactionalId", name) and not may:
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"{role.name} needs Write on transactional id {name}, which this user does not have",
                remedy=role.grant,
            )
        if may and "Write" not in _needed(role.allowed, "transactionalId", name):
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"this user may Write under transactional id {name}, which {role.name} does not need, and so "
                "fence its owner",
                remedy=role.withdraw,
            )


def _of_cluster(config: RunConfig, role: str) -> Iterator[Finding]:
    beyond = access_control.cluster_operations(config.kafka)
    if beyond:
        yield Finding(
            check=_CHECK,
            level="fault",
            text=f"this user may {_listed(beyond)} on the cluster, which {role} does not need",
            remedy="remove the rule from your brokers",
        )


def _listed(operations: Iterable[str]) -> str:
    return ", ".join(sorted(operations))
