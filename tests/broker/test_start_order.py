"""A role waits until its topics, the first state of grouping, and the roles before it are there."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version

import pytest

from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.pipeline.config import RunConfig, ServiceConfig
from rollstream.pipeline.deployment.start_order import await_start
from rollstream.pipeline.process.role_process import RolePhase
from rollstream.pipeline.process.service import ServiceServer
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import provisioning
from rollstream.topics.metrics.values import MetricValues
from tests.support.command_line import answer_of
from tests.support.runs import RealRun


@pytest.fixture
def config(real_run: RealRun) -> RunConfig:
    return RunConfig(run=real_run.name, kafka=real_run.kafka, topics=real_run.topics)


@pytest.fixture
def group_process(config: RunConfig) -> Iterator[tuple[RolePhase, MetricValues, str]]:
    """The service port of a grouping process: its phase, its metrics and its address."""
    phase, values = RolePhase(), MetricValues()
    server = ServiceServer(ServiceConfig(), run=config.run, role="group", process="group-0", phase=phase, values=values)
    yield phase, values, server.url.removeprefix("http://")
    server.close()


def missing(config: RunConfig, role: str, *hosts: str) -> str:
    """The error of a role that waits for half a second."""
    with pytest.raises(DeadlineExceeded) as refused:
        await_start(config, role, hosts, 0.5)
    return str(refused.value)


def test_a_role_waits_for_its_topics_and_grouping_for_its_first_state(config: RunConfig, real_run: RealRun) -> None:
    absent = missing(config, "infer")
    assert (
        f"topics {config.run}.control, {config.run}.metrics, {config.run}.policies, {config.run}.weights are missing"
        in absent
    )
    provisioning.apply(config.kafka, config.topics, config.run)
    await_start(config, "infer", (), 60)
    assert "the first state of grouping is missing; `rollstream topics apply` writes it" in missing(config, "group")
    initialise(config.kafka, config.run, config.grouping, config.grouper)
    await_start(config, "group", (), 60)


def test_a_role_waits_until_one_before_it_is_ready_and_of_its_release(
    config: RunConfig, group_process: tuple[RolePhase, MetricValues, str]
) -> None:
    phase, values, address = group_process
    provisioning.apply(config.kafka, config.topics, config.run)
    assert f"no process at {address} is ready" in missing(config, "env", address)
    phase.ready()
    await_start(config, "env", [address], 60)
    await_start(config, "env", [address.replace("127.0.0.1", "localhost")], 60)
    values.put("rollstream_info", 1, "group", "9.9.9")
    own = version("rollstream")
    assert f"a process at {address} is of release 9.9.9, but this one is of {own}" in missing(config, "env", address)


def test_the_command_says_what_is_missing_in_one_line(config: RunConfig, real_run: RealRun) -> None:
    words = real_run.command("deploy", "wait", "group", "--wait", "1", "--ready", "nowhere.invalid:8081")
    answer = answer_of(real_run.directory, *words[4:])
    assert answer.returncode == 2
    assert re.search(r"group does not start: after 1 s topics \S+batch-index, .* are missing", answer.stderr)
    assert "Traceback" not in answer.stderr


def test_a_role_of_a_run_without_topics_ends_with_one_line_and_the_remedy(real_run: RealRun) -> None:
    # A name that resembles that of an existing run would get a question instead.
    run = replace(real_run, name="unlike-any-other")
    for role in ("group", "learn", "infer", "env"):
        process = run.start(role)
        assert process.wait(300) == 2
        [line] = [line for line in run.log_of(process).splitlines() if not line.startswith("{")]
        assert line.startswith("rollstream: topic unlike-any-other.")
        assert "rollstream topics apply" in line
