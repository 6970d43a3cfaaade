"""Compares what a run left on a real broker with the description of its roles."""

from collections.abc import Mapping

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import ROLES, expanded, role_of
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.hanging_transactions import admin_client
from rollstream.topics.kafka.topic_admin import group_names
from rollstream.topics.wire.catalogue import CATALOGUE, TOOLS, topic_name


def undescribed(config: RunConfig, processes: Mapping[str, int]) -> set[str]:
    """Groups, transactional ids and written topics of a run that the roles of these processes do not account for."""
    run, kafka = config.run, config.kafka
    with admin_client(kafka) as client:
        listed = client.list_transactions()
    ids = {each.transactional_id for actual in listed.values() for each in actual}
    used = {name for name in ids if name.startswith(f"{run}/")} | {
        name for name in group_names(kafka) if name.startswith(f"{run}.")
    }
    # `topics apply` writes the first state of grouping, and its first positions.
    known = {f"{run}/grouper/bootstrap", expanded(role_of("group").groups[0], config)}
    for role, count in processes.items():
        templates = (*role_of(role).groups, *role_of(role).transactional_ids)
        known |= {expanded(template, config, number) for template in templates for number in range(count)}
    written = {
        spec.name
        for spec in CATALOGUE
        if any(end for _begin, end in topic_admin.bounds(kafka, topic_name(run, spec.name)).values())
    }
    writable = {spec.name for spec in CATALOGUE if {*processes, TOOLS} & set(spec.writers)}
    assert set(processes) <= {role.name for role in ROLES}
    return (used - known) | (written - writable)
