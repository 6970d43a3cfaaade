"""Commands to a real `rollstream run` with default settings, and what they leave on its topics."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from tests.support.steered_run import SteeredRun


@pytest.fixture
def steered(broker: str, run_name: str, tmp_path: Path) -> Iterator[SteeredRun]:
    run = SteeredRun(broker, run_name, tmp_path)
    try:
        yield run
    finally:
        run.close()


def killed_at(run: SteeredRun, command: Callable[[], object]) -> None:
    """Give a command, kill the overseer at that moment, and start it again."""
    command()
    run.kill()
    run.start()


@pytest.mark.long
def test_a_run_follows_numbers_of_processes_also_after_its_end_and_nothing_is_lost(steered: SteeredRun) -> None:
    run = steered
    run.start()
    run.await_processes(env=1, group=1, infer=1)
    run.say("scale", "env=3", "group=3", "infer=2")
    run.await_processes(env=3, group=3, infer=2)
    run.await_steps(2)
    killed_at(run, lambda: run.say("scale", "env=2", "group=2", "infer=1"))
    run.await_processes(env=2, group=2, infer=1)
    run.await_steps(2)
    run.say("scale", "env=auto", "group=auto", "infer=auto")
    run.await_processes(env=1, group=1, infer=1)
    run.stop()
    run.check()
    assert "role_killed" not in run.output


@pytest.mark.long
def test_a_run_ends_after_the_step_that_is_asked_for_and_one_that_begins_later_knows_it(steered: SteeredRun) -> None:
    run = steered
    run.start()
    run.await_steps(1)
    last = run.step_ahead()
    assert f"after step {last}" in run.say("stop", "--at-step", str(last))
    assert run.process.wait(600) == 0, run.output
    assert f"as `rollstream steer stop --at-step {last}` asked" in run.output
    assert run.top()["step"] == last
    run.start()
    assert run.process.wait(600) == 0, run.output
    assert run.top()["step"] == last
    assert run.say("stop", "--withdraw").endswith("train as long as their settings say\n")
    run.start(learner__max_steps=last + 1)
    assert run.process.wait(600) == 0, run.output
    assert run.top()["step"] == last + 1
    run.check()


def unread_rollouts(run: SteeredRun) -> int:
    """The number of rollouts that grouping has not read, without the marks that it may write at its end."""
    topic = topic_name(run.name, "rollouts")
    group = GrouperConfig().group_id(run.name)
    partitions = topic_admin.partitions_of(run.kafka, topic)
    start = {place.partition: place.offset for place in committed_offsets(run.kafka, group, topic, partitions)}
    return sum(codec.kind_of(message.value) == "Rollout" for message in read_to_end(run.kafka, topic, start=start))


@pytest.mark.long
def test_a_drained_run_ends_with_nothing_in_flight_also_over_kills_and_goes_on_when_that_is_withdrawn(
    steered: SteeredRun,
) -> None:
    run = steered
    run.start()
    run.await_steps(1)
    killed_at(run, lambda: run.say("stop", "--drain"))
    assert run.process.wait(600) == 0, run.output
    assert "as `rollstream steer stop --drain` asked, with nothing in flight" in run.output
    assert "role_killed" not in run.output
    books = ledger(run.kafka, run.name)
    assert (books.problems, books.in_flight) == ([], 0)
    assert (run.top()["waiting"], unread_rollouts(run)) == (0, 0)
    last = run.top()["step"]
    run.start()
    assert run.process.wait(600) == 0, "what was drained begins nothing: " + run.output
    assert run.top()["step"] == last
    run.say("stop", "--withdraw")
    run.start()
    run.await_steps(2)
    run.stop()
    run.check()
