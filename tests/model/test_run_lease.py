"""One `rollstream run` supervises a run; another is told where, and takes the place of a dead one."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rollstream.infra.broker.process_identity import ProcessIdentity
from rollstream.pipeline.run.run_lease import RENEW_S, RunLease
from rollstream.topics.config import TopicsConfig
from rollstream.topics.control import steering
from rollstream.topics.control.named_records import write
from rollstream.topics.control.steering import SteeringFollower
from rollstream.topics.errors import ConfigurationError, Fenced
from rollstream.topics.kafka.provisioning import apply
from rollstream.topics.records import RunSupervisor
from tests.support.runs import RealRun
from tests.support.waiting import eventually

ADOPTION_S = 10.0
ONE, TWO = ProcessIdentity(100, "boot-1:7"), ProcessIdentity(200, "boot-2:7")
DEAD = RunSupervisor(
    supervisor="boot-1:7:100",
    epoch=4,
    host="gpu-7",
    pid=100,
    directory="/data/runs/main",
    began=1_700_000_000.0,
    lease_s=40.0,
    wall_time=1.0,
)


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    apply(real_run.kafka, TopicsConfig(partitions=1), real_run.name)
    return real_run


Overseer = Callable[..., RunLease]


def eventually_raises(lease: RunLease) -> None:
    """Raise the error that `check` raises once the lease is lost."""

    def lost() -> bool:
        with suppress(Fenced):
            lease.check()
            return False
        return True

    eventually(lost, 60, "the end of a lease")
    lease.check()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def overseer(run: RealRun, stack: ExitStack) -> Overseer:
    """Takes the lease in a process that follows the topic by itself."""

    def take(me: ProcessIdentity, previous: ProcessIdentity | None = None, *, take_over: bool = False) -> RunLease:
        following = stack.enter_context(SteeringFollower(run.kafka, run.name))
        folder = Path("/data") / me.started
        lease = RunLease(
            run.kafka,
            run.name,
            following,
            directory=folder,
            adoption_s=ADOPTION_S,
            previous=previous,
            take_over=take_over,
            me=me,
        )
        return stack.enter_context(lease)

    return take


def test_a_second_overseer_is_refused_with_the_place_of_the_first_and_may_start_after_its_end(
    overseer: Overseer, stack: ExitStack
) -> None:
    first, began = overseer(ONE), time.monotonic()
    with pytest.raises(
        ConfigurationError,
        match=r"is supervised on \S+ by process 100 since \d{4}-.* UTC \(its files: /data/boot-1:7\)",
    ):
        overseer(TWO)
    assert time.monotonic() - began < 1.2 * RENEW_S, "one record of the first was enough"
    first.check()
    first.close()
    began = time.monotonic()
    overseer(TWO).check()
    assert time.monotonic() - began < RENEW_S, "an end that was recorded is not waited for"


def test_an_overseer_takes_over_only_when_told_to_and_the_other_then_ends(overseer: Overseer) -> None:
    first = overseer(ONE)
    second = overseer(TWO, take_over=True)
    with pytest.raises(Fenced, match=r"was taken over: it is supervised on \S+ by process 200 since"):
        eventually_raises(first)
    time.sleep(3 * RENEW_S)  # the first still writes its records until it has stopped its processes
    second.check()
    first.close()
    second.check()


def test_the_lease_of_a_killed_overseer_ends_by_itself_and_at_once_in_its_own_folder(
    overseer: Overseer, run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run.kafka, run.name, steering.SUPERVISOR, {DEAD.supervisor: DEAD})
    began = time.monotonic()
    with overseer(TWO):
        assert 40.0 <= time.monotonic() - began < 50.0
        said = capsys.readouterr().out
        assert re.search(r"was supervised on gpu-7 by process 100 since 2023-11-14 22:13:20 UTC .* waits 40 s", said)
        [left] = steering.desired_state(run.kafka, run.name).supervisors.values()
        assert (left.pid, left.epoch, left.lease_s) == (200, 5, ADOPTION_S + 10.0)
    write(run.kafka, run.name, steering.SUPERVISOR, {DEAD.supervisor: DEAD})
    began = time.monotonic()
    overseer(TWO, ONE).check()
    assert time.monotonic() - began < RENEW_S


def test_of_two_overseers_that_start_together_one_stays(overseer: Overseer, run: RealRun) -> None:
    first = overseer(ONE)
    rival = RunSupervisor(**{**vars(DEAD), "epoch": 0, "supervisor": "boot-0:7:100"})
    write(run.kafka, run.name, steering.SUPERVISOR, {rival.supervisor: rival})
    time.sleep(2 * RENEW_S)
    first.check()
    later = RunSupervisor(**{**vars(DEAD), "epoch": 0, "supervisor": "boot-9:7:100"})
    write(run.kafka, run.name, steering.SUPERVISOR, {later.supervisor: later})
    with pytest.raises(Fenced, match="on gpu-7 by process 100"):
        eventually_raises(first)
