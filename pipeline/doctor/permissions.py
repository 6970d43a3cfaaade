"""Compares the rights of this client's user with the rights that a role needs, and names missing and excess rights.

A rule for a prefix is checked with the name of process 0.
"""

from collections.abc import Iterable, Iterator, Mapping

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import AccessRule, access_rules
from rollstream.pipeline.deployment.description import ROLES, expanded
from rollstream.pipeline.doctor.findings import Finding
from rollstream.topics.catalogue import CATALOGUE, topic_name
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import granted

_IMPLIED = {"Read": {"Describe"}, "Write": {"Describe"}, "Delete": {"Describe"}, "AlterConfigs": {"DescribeConfigs"}}
_EVERYTHING = {"Read", "Write", "Alter", "Delete", "AlterConfigs"}
"""Operations on a topic that no user of a run has all at once."""
_CHECK = "permissions"


def check_permissions(config: RunConfig, role: str) -> Iterator[Finding]:
    """Yield findings on rights that the user of these settings lacks for a role, and on rights that the role does not
    need."""
    topics = granted.topic_operations(config.kafka, [topic_name(config.run, spec.name) for spec in CATALOGUE])
    if any((operations or frozenset()) >= _EVERYTHING for operations in topics.values()):
        yield Finding(
            check=_CHECK,
            level="note",
            text="this user may do everything: the brokers have no authorizer, or it is a super user",
            remedy=f"give {role} a user of its own on brokers with an authorizer: rollstream topics acls apply",
        )
        return
    rules = access_rules(config, role)
    faults = [
        *_compared("topic", topics, rules, role),
        *_compared("group", granted.group_operations(config.kafka, _names(config, "groups")), rules, role),
        *_transactional_ids(config, rules, role),
        *_of_cluster(config, role),
    ]
    yield from faults
    if not [finding for finding in faults if finding.level == "fault"]:
        yield Finding(check=_CHECK, level="ok", text=f"this user may do what {role} needs, and nothing else in the run")


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


def _compared(
    resource: str, may: Mapping[str, frozenset[str] | None], rules: tuple[AccessRule, ...], role: str
) -> Iterator[Finding]:
    for name, operations in may.items():
        if operations is None:
            continue  # a topic that does not exist is a finding of its own
        needed = _needed(rules, resource, name)
        # The brokers never list Create for a topic that exists.
        lacking = needed - operations - {"Create"}
        beyond = operations - needed
        if lacking:
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"{role} needs {_listed(lacking)} on {resource} {name}, which this user does not have",
                remedy=f"rollstream topics acls apply --role {role}",
            )
        if beyond:
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"this user may {_listed(beyond)} on {resource} {name}, which {role} does not need",
                remedy="remove the rule: rollstream topics acls plan shows it",
            )


def _transactional_ids(config: RunConfig, rules: tuple[AccessRule, ...], role: str) -> Iterator[Finding]:
    try:
        writable = granted.writable_ids(config.kafka, _names(config, "transactional_ids"))
    except ConfigurationError as error:
        yield Finding(check=_CHECK, level="note", text=f"transactional ids were not checked: {error}")
        return
    for name, may in writable.items():
        needed = "Write" in _needed(rules, "transactionalId", name)
        if needed and not may:
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"{role} needs Write on transactional id {name}, which this user does not have",
                remedy=f"rollstream topics acls apply --role {role}",
            )
        if may and not needed:
            yield Finding(
                check=_CHECK,
                level="fault",
                text=f"this user may Write under transactional id {name}, which {role} does not need, and so fence "
                "its owner",
                remedy="remove the rule: rollstream topics acls plan shows it",
            )


def _of_cluster(config: RunConfig, role: str) -> Iterator[Finding]:
    beyond = granted.cluster_operations(config.kafka)
    if beyond:
        yield Finding(
            check=_CHECK,
            level="fault",
            text=f"this user may {_listed(beyond)} on the cluster, which {role} does not need",
            remedy="remove the rule from your brokers",
        )


def _listed(operations: Iterable[str]) -> str:
    return ", ".join(sorted(operations))
