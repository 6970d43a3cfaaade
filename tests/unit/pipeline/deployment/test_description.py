"""The description of a run agrees with its commands, its settings and its topics, and the plan is made from it."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.command_line.commands import GROUPS
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.description import (
    NUMBER,
    ROLES,
    SERVICE_PORT_SETTING,
    RoleDescription,
    counts,
    expanded,
    role_of,
)
from rollstream.pipeline.run.plan import plan
from rollstream.pipeline.settings import known_keys
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.catalogue import CATALOGUE, TOOLS
from tests.support.paths import ROOT

MOST: Mapping[str, str] = {
    "learner.processes": "2",
    "inference.replicas": "2",
    "serving.python": "python",
    "serving.urls": '["http://127.0.0.1:8000"]',
    "grouper.processes": "3",
    "labeling.processes": "2",
    "supervisor.workers": "4",
    "gateway.port": "8100",
    "evaluation.every_versions": "50",
    "collect.processes": "2",
    "fill.directory": "windows",
    "tracker.to": "trackio",
}
"""Each setting that counts a role, with a value other than the default."""
LABELED = ["labeling.labeler=judge", "environments.0.use=add", "environments.0.rewards=labeler"]
every_role = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)


@every_role
def test_a_role_is_a_command_that_takes_the_flags_it_is_started_with(role: RoleDescription) -> None:
    args = build_parser().parse_args([*role.arguments(3), "--config", "run.toml"])
    assert (args.command, args.config) == (role.name, Path("run.toml"))
    if role.numbered:
        assert getattr(args, role.number_flag.removeprefix("--")) == 3


def test_every_command_of_a_role_is_described_and_nothing_else() -> None:
    modules = {path.stem for path in (ROOT / "pipeline" / "roles").glob("*.py")} - {"__init__", "jax_runtime"}
    commands = {name for name, (module, _summary) in GROUPS["role"].items() if module.removeprefix("roles.") in modules}
    assert {role.name for role in ROLES if role.command[0] == "role"} == commands
    assert len({role.name for role in ROLES}) == len(ROLES)


@every_role
def test_every_setting_that_a_role_names_exists(role: RoleDescription) -> None:
    templates = (*role.groups, *role.transactional_ids)
    braces = {name for template in templates for name in re.findall(r"\{(.*?)\}", template)} - {NUMBER}
    assert SERVICE_PORT_SETTING in known_keys(RunConfig)
    assert {*braces, *role.ports, *filter(None, (role.counted_by, role.keeps))} <= set(known_keys(RunConfig))


def test_every_extra_that_a_role_names_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for role in ROLES:
        for extra in role.extras:
            assert re.search(rf"^{extra} = \[", text, re.MULTILINE)


@pytest.mark.parametrize("role", [role for role in ROLES if role.counted_by], ids=lambda role: role.name)
def test_the_setting_that_counts_a_role_decides_how_many_are_started(role: RoleDescription) -> None:
    control = role.tasks == ("control",)
    # A control run has at least one of its roles; a labeler counts in a run that waits for one.
    base = ["collect.player=a:b", *([] if control else LABELED if role.name == "label" else [])]
    flags = [*base, f"{role.counted_by}={MOST[role.counted_by]}"]
    value = MOST[role.counted_by]
    several = value.isdecimal() and int(value) < 10
    assert counts(load(flags=flags))[role.name] == (int(value) if several else 1)
    assert {role.counted_by for role in ROLES if role.counted_by} == set(MOST)


def test_a_run_has_the_roles_of_its_task_and_by_default_no_optional_one() -> None:
    assert counts(load()) == {"learn": 1, "infer": 1, "group": 2, "env": 2}
    control = ["collect.processes=1", "collect.player=a:b", "gateway.port=8100", "evaluation.every_versions=5"]
    assert counts(load(flags=control)) == {"collect": 1}


def test_topics_are_read_and_written_by_roles_that_are_described() -> None:
    names = {role.name for role in ROLES} | {TOOLS}
    for spec in CATALOGUE:
        assert {*spec.readers, *spec.writers} <= names, spec.name
        assert len(set(spec.readers)) == len(spec.readers), spec.name
        assert len(set(spec.writers)) == len(spec.writers), spec.name
    assert role_of("group").writes == (
        "rollouts",
        "batches",
        "batch-index",
        "journal",
        "metrics",
        "dead-letters",
        "control",
    )
    assert "rollouts" in role_of("archive").reads
    assert role_of("archive").writes == ()


def test_topics_that_code_of_environments_writes_to_are_recompressed_by_the_brokers() -> None:
    settings = {spec.name: spec.settings(TopicsConfig(), KafkaConfig()) for spec in CATALOGUE}
    recompressed = {name for name in settings if settings[name].get("compression.type") == "zstd"}
    assert recompressed == {"rollouts", "evals", "metrics", "unlabelled", "trajectories", "calls", "control"}


def test_no_role_waits_for_one_that_starts_later_and_the_plan_starts_them_in_this_order(tmp_path: Path) -> None:
    order = [role.name for role in ROLES]
    for role in ROLES:
        assert all(order.index(name) < order.index(role.name) for name in role.after)
        # A role that others wait for does not wait itself, so two rounds of starts are enough.
        assert all(role_of(name).after == () for name in role.after)
    config = load(flags=[*LABELED, "gateway.port=8100", "evaluation.every_versions=1"])
    roles = plan(config, tmp_path / "run.toml")
    assert [spec.name for spec in roles.consumers] == ["learn", "infer", "group-0", "group-1", "label-0"]
    assert [spec.name for spec in roles.producers] == ["env-0", "env-1", "gateway", "eval"]


def test_names_on_kafka_are_those_of_the_run_and_the_process() -> None:
    config = load(flags=["run=main", "grouper.group=g"])
    group = role_of("group")
    assert [expanded(name, config, 2) for name in group.groups] == ["main.g", "main.g.turn-2"]
    assert config.grouper.group_id(config.run) in [expanded(name, config) for name in group.groups]
    assert config.labeling.group_id("main") == expanded(role_of("label").groups[0], config)
    assert [expanded(name, config, 2) for name in group.transactional_ids] == ["main/grouper/2"]


def test_a_role_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="no role is named 'grouper'; roles are sink, learn, infer"):
        role_of("grouper")


def test_the_description_imports_neither_kafka_nor_jax() -> None:
    look = (
        "import sys, rollstream.pipeline.deployment.description\n"
        "print({'confluent_kafka', 'kafka', 'jax', 'numpy'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip() == "set()"
