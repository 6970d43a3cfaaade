"""What a grouping process reads, over a model of Kafka: every record once, and the newest policy version."""

import threading

import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.grouping_process import GroupingProcess
from rollstream.topics.records import Mark, PolicyManifest, TrainingBatch
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from tests.simulation.installation import World
from tests.simulation.model_consumer import ModelConsumer
from tests.simulation.scheduler import Process
from tests.support.modelled_run import GROUPS_IN_BATCH, KAFKA, MEMBERS, RUN, ModelledRun


def records(run: ModelledRun, name: str) -> list[object]:
    log = run.log(name)
    return [decode(entry.value) for entry in log.visible(0, log.end, True)[0]]


def test_records_that_a_seek_passed_over_are_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seek, passed = ModelledRun(world), ModelConsumer.seek, []
    run.send()

    def seek_too_far(consumer: ModelConsumer, place: TopicPartition) -> None:
        """A client that seeks while it asks for the end goes on behind the offset, once."""
        if place.topic == f"{RUN}.rollouts" and not passed:
            seek(consumer, TopicPartition(place.topic, place.partition, place.offset + MEMBERS))
            passed.append(place.offset)
        else:
            seek(consumer, place)

    monkeypatch.setattr(ModelConsumer, "seek", seek_too_far)
    stop = threading.Event()
    grouping = GroupingConfig(batch_rollouts=GROUPS_IN_BATCH * MEMBERS)

    def work() -> None:
        GroupingProcess(KAFKA, RUN, grouping, GrouperConfig(metrics_interval_s=0), 0, lambda: None).run(stop)

    actor = world.scheduler.spawn(Process("group-0"), "group-0", work)
    committed = run.cluster.groups[f"{RUN}.grouper"].offsets
    world.scheduler.run(lambda: actor.done or committed[f"{RUN}.rollouts", 0].offset >= GROUPS_IN_BATCH * MEMBERS)
    stop.set()
    world.scheduler.run(lambda: actor.done)
    assert (actor.error, len(passed)) == (None, 1)
    world.scheduler.run(lambda: run.cluster.at_rest)
    assert [len(batch) for batch in records(run, "batches") if isinstance(batch, TrainingBatch)] == [4]


def test_a_version_that_is_published_again_does_not_take_marks_back(world: World) -> None:
    run = ModelledRun(world)
    for version in (2, 1):
        manifest = PolicyManifest(version=version, learner="test", step=0, epoch="e", tensors=(), chunks=(), digest="")
        run.write("policies", encode_key(version), encode(manifest))
    run.send()
    run.group()
    marks = [record.policy_version for record in records(run, "rollouts") if isinstance(record, Mark)]
    assert max(marks) == 2


def test_a_mistake_of_ours_names_the_record_at_which_it_shows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a process reads the records of a poll together."""
    run = ModelledRun(world)
    run.send()

    def mistaken(*_: object) -> None:
        raise NameError("name 'planted' is not defined")

    for reading in ("process.task_manager", "core.drop_rules"):
        monkeypatch.setattr(f"rollstream.consumers.grouping.{reading}.read_rollouts", mistaken)

    def work() -> None:
        GroupingProcess(KAFKA, RUN, GroupingConfig(), GrouperConfig(), 0, lambda: None).run(threading.Event())

    actor = world.scheduler.spawn(Process("group-0"), "group-0", work)
    world.scheduler.run(lambda: actor.done)
    assert isinstance(actor.error, NameError)
    assert "of rollouts[0] ends grouping" in actor.error.__notes__[0]
