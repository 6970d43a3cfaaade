"""Grouping processes are added and removed by their lag: all is real except the lag, which the tests make up."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rollstream.consumers.grouping.config import AutoscaleConfig
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.description import GROUP
from rollstream.pipeline.launch.scale_series import coverage, readings
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run.autoscaling import GroupScaler, at_first
from rollstream.pipeline.run.plan import ServicePorts
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka.groups import members, remove_members
from rollstream.topics.records import Metrics
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

PARTITIONS = 4
SESSION_S = 60.0
"""Longer than any wait here: partitions of a process that was removed move because it left, not because it expired."""


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    real_run.topics = TopicsConfig(partitions=PARTITIONS)
    # Members learn of a rebalance with their next heartbeat.
    client = {"heartbeat.interval.ms": "500"}
    real_run.kafka = replace(real_run.kafka, session_timeout_s=SESSION_S, client=client)
    return real_run.prepare()


def settings(run: RealRun) -> RunConfig:
    """Settings of a supervised run whose processes write their own lag once, when they start."""
    config = load(flags=[f"run={run.name}", f"data_dir={run.directory}", f"topics.partitions={PARTITIONS}"])
    rule = AutoscaleConfig(enabled=True, lag_per_process=100, interval_s=0.2, cooldown_s=0.5)
    grouper = replace(run.grouper, processes=1, autoscale=rule, metrics_interval_s=3600.0)
    return at_first(replace(config, kafka=run.kafka, grouping=run.grouping, grouper=grouper))


def tell_lag(run: RealRun, lag: float) -> None:
    """Write metrics as processes do, with a lag for each partition."""
    for partition in range(PARTITIONS):
        labels = {"consumergroup": run.grouper.group_id(run.name), "partition": str(partition)}
        record = Metrics(component="test", timestamp=time.time(), step=-1, values={"lag": lag}, labels=labels)
        run.send_bytes("metrics", encode(record), encode_key("test"))


@pytest.fixture
def supervised(run: RealRun) -> Iterator[tuple[Supervisor, GroupScaler]]:
    config = settings(run)
    path = plans.write(config)
    ports = ServicePorts(config)
    environment = plans.child_environment(config, run.environment())
    with Supervisor(run.directory / "logs", environment=environment, place=ports.place) as supervisor:
        groupers = plans.plan(config, path).of(GROUP)
        assert [spec.name for spec in groupers] == ["group-0"]
        supervisor.start(*groupers)
        supervisor.wait_ready(["group-0"])
        with closing(GroupScaler(config, path, supervisor, ports)) as scaler:
            yield supervisor, scaler


def scale_to(run: RealRun, supervised: tuple[Supervisor, GroupScaler], lag: float, processes: int) -> None:
    """Report a lag until so many processes run, and no others are in the group."""
    supervisor, scaler = supervised
    wanted = [f"group-{ordinal}" for ordinal in range(processes)]

    def there() -> bool:
        tell_lag(run, lag)
        supervisor.poll(0.1)
        scaler.poll()
        running = sorted(supervisor.pids)
        return running == wanted and all(map(supervisor.is_ready, running)) and scaler.settled

    eventually(there, 120, f"{processes} processes")
    group = run.grouper.group_id(run.name)
    eventually(lambda: members(run.kafka, group) == processes, SESSION_S / 2, f"{processes} members of the group")


@pytest.mark.long
def test_processes_come_and_go_with_the_lag_leave_the_group_and_come_back_under_their_ordinals(
    run: RealRun, supervised: tuple[Supervisor, GroupScaler]
) -> None:
    sent = 0
    for number, (lag, processes) in enumerate(((60.0, 3), (0.0, 1), (60.0, 3))):
        scale_to(run, supervised, lag, processes)
        run.send(rollout(f"x{number}.{example}", member) for example in range(16) for member in range(4))
        sent += 64
        settled(run, batched=sent)
    actual = readings(run.kafka, run.name)
    # No grouping process wrote the first record of a journal.
    writers = {reading.writer for reading in actual if reading.writer}
    assert writers == {f"{run.name}/grouper/{ordinal}" for ordinal in (0, 1, 2)}
    counted = coverage(actual)
    assert (counted.twice, counted.missing) == (0, 0)
    again = (run.directory / "logs" / "group-1.log").read_text()
    assert again.count('"event": "closed"') == 1
    assert again.count('"event": "task_restored"') >= 2


@pytest.mark.long
def test_a_member_that_is_not_in_the_group_is_named(run: RealRun) -> None:
    group = run.grouper.group_id(run.name)
    process = run.start("group", kafka__session_timeout_s=SESSION_S)
    eventually(lambda: '"task_restored"' in run.log_of(process), 60, "the process groups")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    assert members(run.kafka, group) == 1  # a static member does not leave by itself
    name = run.grouper.member(run.name, 0)
    remove_members(run.kafka, group, [name])
    eventually(lambda: members(run.kafka, group) == 0, SESSION_S / 2, "the end of its membership")


@pytest.mark.long
def test_a_process_that_is_scaled_by_others_leaves_the_group_as_it_stops(run: RealRun) -> None:
    group = run.grouper.group_id(run.name)
    run.grouper = replace(run.grouper, leave_on_stop=True)
    for ordinal in range(2):
        process = run.start("group", "--ordinal", str(ordinal), kafka__session_timeout_s=SESSION_S)
        eventually(lambda p=process: '"assigned"' in run.log_of(p), 60, "a member")  # type: ignore[misc]
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    assert members(run.kafka, group) == 1
    run.send(rollout(f"x{example}", member) for example in range(16) for member in range(4))
    settled(run, batched=64)


@pytest.mark.long
def test_a_run_adds_processes_when_grouping_falls_behind_and_ends_with_all_of_them(
    broker: str, run_name: str, tmp_path: Path
) -> None:
    values = {
        "data_dir": tmp_path,
        "grouper.processes": 1,
        "grouper.records_per_s": 20,
        "grouper.metrics_interval_s": 0.5,
        "grouper.autoscale.enabled": "true",
        "grouper.autoscale.lag_per_process": 30,
        "grouper.autoscale.interval_s": 1,
        "learner.model.num_hidden_layers": 1,
        "worker.group_size": 4,
        "grouping.batch_rollouts": 8,
        "learner.rollouts_per_step": 32,
        "learner.microbatch_rows": 4,
    }
    flags = [f"--set={name}={value}" for name, value in values.items()]
    command = ["run", "recipes/dsort3/run.toml", "--run", run_name, "-b", broker, *flags]
    run = subprocess.Popen(
        [sys.executable, "-P", "-m", "rollstream", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout is not None
        line = run.stdout.readline()
        assert "5 processes are ready" in line, line
        while "grouping has" not in line:
            line = run.stdout.readline()
            assert line, "the run ended"
        children = psutil.Process(run.pid).children()

        def groupers() -> int:
            return sum("group" in child.cmdline() for child in psutil.Process(run.pid).children())

        eventually(lambda: groupers() > 1, 60, "a further process")
        run.terminate()
        _output, errors = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    assert "role_killed" not in errors
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    kafka = KafkaConfig(bootstrap_servers=broker)
    assert ledger(kafka, run_name).problems == []
    assert verify(kafka, run_name).mismatches == []
