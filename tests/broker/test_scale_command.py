"""`rollstream steer scale`: what it records on a real broker, and the processes of a run that follow it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.control import steering
from rollstream.pipeline.deployment.description import GROUP
from rollstream.pipeline.launch.scale_series import coverage, readings
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run.plan import ServicePorts
from rollstream.pipeline.run.steered_processes import SteeredProcesses, begin_with
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.topics.config import TopicsConfig
from rollstream.topics.control.steering import SteeringFollower
from rollstream.topics.kafka.groups import members
from tests.model.test_scale_command import PARTITIONS, said
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    real_run.topics = TopicsConfig(partitions=PARTITIONS)
    # This is longer than any wait here, so partitions move because a process left, not because it expired.
    client = {"heartbeat.interval.ms": "500"}
    real_run.kafka = replace(real_run.kafka, session_timeout_s=60.0, client=client)
    return real_run.prepare()


def settings(run: RealRun) -> RunConfig:
    config = load(flags=[f"run={run.name}", f"data_dir={run.directory}", f"topics.partitions={PARTITIONS}"])
    grouper = replace(run.grouper, processes=1)
    return replace(config, kafka=run.kafka, grouping=run.grouping, grouper=grouper)


class Grouping:
    """The grouping processes of a run that begins as `rollstream run` does, and follows commands."""

    def __init__(self, run: RealRun, supervisor: Supervisor, follower: SteeringFollower, ports: ServicePorts) -> None:
        config = settings(run)
        path = plans.write(config)
        self.said: list[str] = []
        running = begin_with(config, follower.state)
        groupers = plans.plan(running, path).of(GROUP)
        self.began_with = [spec.name for spec in groupers]
        supervisor.start(*groupers)
        supervisor.wait_ready(self.began_with)
        self._run, self._supervisor, self._follower = run, supervisor, follower
        put_back = partial(steering.put_back, run.kafka, run.name)
        self._steered = SteeredProcesses(
            config, running, path, supervisor, ports, scaler=None, say=self.said.append, put_back=put_back
        )

    def await_processes(self, processes: int) -> None:
        """Wait until so many processes run and are ready, and no others are members of their group."""
        wanted = [f"group-{ordinal}" for ordinal in range(processes)]

        def there() -> bool:
            self._supervisor.poll(0.1)
            self._steered.poll(self._follower.state)
            running = sorted(self._supervisor.pids)
            return running == wanted and all(map(self._supervisor.is_ready, running))

        eventually(there, 120, f"{processes} processes")
        group = self._run.grouper.group_id(self._run.name)
        eventually(lambda: there() and members(self._run.kafka, group) == processes, 60, "members of the group")


@contextmanager
def begun(run: RealRun) -> Iterator[Grouping]:
    config = settings(run)
    ports = ServicePorts(config)
    environment = plans.child_environment(config, run.environment())
    with (
        SteeringFollower(run.kafka, run.name) as follower,
        Supervisor(run.directory / "logs", environment=environment, place=ports.place) as supervisor,
    ):
        yield Grouping(run, supervisor, follower, ports)


def grouping(run: RealRun, began_with: list[str], *numbers: int) -> None:
    """Begin as `rollstream run` does, ask for each number of processes in turn, and end."""
    with begun(run) as groups:
        assert groups.began_with == began_with
        for number in numbers:
            assert said(run, f"group={number}").returncode == 0
            groups.await_processes(number)
            before = ledger(run.kafka, run.name).batched
            run.send(rollout(f"x{before}.{example}", member) for example in range(12) for member in range(4))
            settled(run, 120, batched=before + 48)


@pytest.mark.long
def test_grouping_follows_commands_begins_with_them_again_and_reads_everything_once(run: RealRun) -> None:
    grouping(run, ["group-0"], 3, 2)
    grouping(run, ["group-0", "group-1"], 2)
    counted = coverage(readings(run.kafka, run.name))
    assert (counted.twice, counted.missing) == (0, 0)
    book = ledger(run.kafka, run.name)
    assert (book.batched, book.problems) == (3 * 48, [])
    assert verify(run.kafka, run.name).mismatches == []
