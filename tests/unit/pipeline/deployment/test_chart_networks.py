"""Network policies and access rules of a chart: each role reaches what it uses, and nothing else."""

import re
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.access_rules import (
    AUDIT,
    EVERYONE,
    OPERATE,
    TOOL_USERS,
    TOPICS,
    USERS,
    access_rules,
    users_of,
)
from rollstream.pipeline.deployment.description import counts, expanded, role_of
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name
from tests.support.charts import DEVELOPMENT, MUCH, THEIR_BROKERS, Release, write_chart
from tests.support.network_policies import allowed

BROKER = {"strimzi.io/cluster": "arithmetic-kafka", "app.kubernetes.io/name": "kafka"}
STRANGER = {"app": "stranger"}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chart(tmp_path_factory.mktemp("much"))


@pytest.mark.long
def test_pods_reach_what_they_use_and_nothing_else(chart: Path) -> None:
    release = Release(chart)
    policies = release.of("NetworkPolicy").values()
    pods = {name: pod["metadata"]["labels"] for name, pod in release.pods().items()}
    service = release.settings("env").service.port
    callers, servers = {"env", "eval", "gateway"}, {"infer"}
    for name, labels in pods.items():
        assert allowed(policies, labels, BROKER, 9093), name
        assert not allowed(policies, labels, BROKER, 9091), "the port of the brokers among themselves"
        assert not allowed(policies, labels, STRANGER, 443)
        for other, theirs in pods.items():
            waits = name not in ("topics", "tools", "prune", "archive") and other in role_of(name).after
            team = name == other == "learn"
            assert allowed(policies, labels, theirs, service) == (waits or team), f"{name} to {other}"
            for port in (8000, 8001):
                asks = name in callers and other in servers
                # Foreign engines listen at 8001; a role that asks them may connect to that port anywhere.
                assert allowed(policies, labels, theirs, port) == (asks or team), f"{name} to {other}:{port}"
        assert not allowed(policies, STRANGER, labels, service)
        assert allowed(policies, STRANGER, labels, 8100) == (name == "gateway"), "agents of the namespace"
    assert allowed(policies, pods["serve-weights"], STRANGER, 8001), "engines"
    assert allowed(policies, pods["label"], STRANGER, 8000), "the judge"
    assert allowed(policies, pods["learn"], pods["learn"], 8476)
    assert not allowed(policies, pods["env"], pods["learn"], 8476)
    monitored = [p["spec"] for p in policies if p["metadata"]["name"] == "arithmetic-network"]
    [scraper] = monitored[0]["ingress"]
    assert scraper["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    theirs = Release(chart, over=THEIR_BROKERS).of("NetworkPolicy").values()
    assert allowed(theirs, pods["env"], STRANGER, 9094), "brokers of others"
    assert not Release(chart, DEVELOPMENT).of("NetworkPolicy")


@pytest.mark.long
def test_roles_that_make_spans_reach_the_collector_and_no_others_do(tmp_path: Path) -> None:
    release = Release(write_chart(tmp_path, MUCH, "--set=traces.endpoint=http://collector:4318/v1/traces"))
    policies = release.of("NetworkPolicy").values()
    pods = {name: pod["metadata"]["labels"] for name, pod in release.pods().items()}
    reaching = {name for name, labels in pods.items() if allowed(policies, labels, STRANGER, 4318)}
    assert reaching == {"env", "gateway", "group", "infer", "learn"}
    assert allowed(policies, pods["label"], STRANGER, 8000), "the judge, as before"
    secured = Release(write_chart(tmp_path, MUCH, "--set=traces.endpoint=https://collector/v1/traces"))
    assert allowed(secured.of("NetworkPolicy").values(), pods["group"], STRANGER, 443)


@pytest.mark.long
def test_every_role_may_use_what_its_description_names_and_nothing_of_other_runs(chart: Path) -> None:
    config = load(chart.parent / "run.toml")
    users = Release(chart).of("KafkaUser")
    assert users.keys() == {f"arithmetic-{name}" for name in users_of(config)}
    assert {f"arithmetic-{name}" for name in TOOL_USERS} <= users.keys()
    for name in users_of(config):
        acls = users[f"arithmetic-{name}"]["spec"]["authorization"]["acls"]
        given = {(acl["resource"]["type"], acl["resource"]["name"], *acl["operations"]) for acl in acls}
        assert given == {(rule.resource, rule.name, *rule.operations) for rule in access_rules(config, name)}
    for name in counts(config):
        role = role_of(name)
        acls = users[f"arithmetic-{name}"]["spec"]["authorization"]["acls"]
        may = {(acl["resource"]["name"], operation) for acl in acls for operation in acl["operations"]}
        assert {(topic_name("arithmetic", topic), "Read") for topic in role.reads} <= may
        assert {(topic_name("arithmetic", topic), "Write") for topic in role.writes} <= may
        written = {resource for resource, operation in may if operation == "Write" and "/" not in resource}
        assert written == {topic_name("arithmetic", topic) for topic in role.writes}
        for template in role.transactional_ids:
            identity = expanded(template, config, 7)
            assert [acl for acl in acls if _covers(acl["resource"], "transactionalId", identity)]
        for template in role.groups:
            assert [acl for acl in acls if _covers(acl["resource"], "group", expanded(template, config, 7))]


def _covers(resource: dict[str, str], kind: str, name: str) -> bool:
    begins = resource["patternType"] == "prefix" and name.startswith(resource["name"])
    return resource["type"] == kind and (begins or resource["name"] == name)


def topics_of(run: str) -> set[str]:
    return {topic_name(run, spec.name) for spec in CATALOGUE}


@pytest.mark.parametrize("role", USERS)
def test_rules_name_only_what_is_this_runs_in_the_catalogue(role: str) -> None:
    config = RunConfig(run="exp")
    topics = topics_of("exp")
    rules = set(access_rules(config, role))
    assert rules >= set(EVERYONE)
    for rule in rules - set(EVERYONE):
        rests = (*topics_of(""), "/grouper/0", "/learner", ".grouper", ".grouper.turn-0", ".archive", ".filler-fill")
        others = [f"{run}{rest}" for run in ("exp-lr", "exp.b", "exp.grouper", "exp.rollouts", "ex") for rest in rests]
        assert not any(rule.name == name or (rule.prefix and name.startswith(rule.name)) for name in others)
        assert set(rule.operations) <= {
            "Read",
            "Write",
            "Describe",
            "DescribeConfigs",
            "Create",
            "AlterConfigs",
            "Delete",
        }
        if rule.resource == "topic":
            assert rule.name in topics
        else:
            assert re.match(r"exp[./]", rule.name)


def test_of_roles_only_prune_deletes_and_only_the_job_of_the_topics_creates() -> None:
    config = RunConfig(run="exp")
    may = {user: {o for r in access_rules(config, user) for o in r.operations} for user in USERS}
    assert [user for user, operations in may.items() if "Delete" in operations] == ["prune", OPERATE]
    assert [user for user, operations in may.items() if {"Create", "AlterConfigs"} & operations] == [TOPICS, OPERATE]
    assert may[AUDIT] == {"Read", "Describe", "DescribeConfigs"}


def test_names_of_users_are_of_one_run_and_one_role() -> None:
    # {run}-{role} would be ambiguous if a role's name ended like another's: run a-serve, role weights.
    assert not [(one, other) for one in USERS for other in USERS if one.endswith(f"-{other}")]


@pytest.mark.parametrize("name", ["exp.grouper.turn-", "a.turn-3", "exp.x.turn-0.y"])
def test_a_run_named_like_the_groups_of_processes_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"as only names of consumer groups may"):
        RunConfig(run=name)


@pytest.mark.parametrize("key", ["grouper.group", "labeling.group", "fill.name"])
def test_a_group_named_like_one_of_another_run_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key} is 'b.grouper'"):
        load(flags=[f"{key}=b.grouper"])
