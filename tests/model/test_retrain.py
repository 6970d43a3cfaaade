"""A recorded run can be audited and continued elsewhere: its steps executed again from the log, or a learner forked."""

from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.learner.input.batch_selection import batches_of
from rollstream.consumers.learner.input.followed_topics import PublisherSteps
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.records import BatchUse, LearnerStep
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun
from tests.support.waiting import eventually


def recorded_step(run: RealRun, number: int, *uses: tuple[str, int, str]) -> LearnerStep:
    """A step that used these batches (id, offset in the index, use), as if each had 16 rows."""
    named = tuple(BatchUse(batch_id=name, index_offset=at, rows=16, use=use) for name, at, use in uses)  # type: ignore[arg-type]
    return LearnerStep(
        learner="default",
        step=number,
        input_run=run.name,
        uses=named,
        position=max((at for _, at, _ in uses), default=-1) + 1,
        policy_version=-1,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
    )


def test_batches_that_are_gone_or_are_others_are_named_before_anything_is_trained(real_run: RealRun) -> None:
    run = real_run
    provisioning.apply(run.kafka, run.topics, run.name)
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(6)])
    # The end of a transaction also takes an offset of the index.
    first = recorded_step(run, 1, ("0-0", 0, "trained"), ("1-1", 2, "skipped"))
    second = recorded_step(run, 2, ("0-2", 4, "trained"), ("1-3", 6, "trained"))
    batches = batches_of(run.kafka, 0, [first, second])
    assert [[read.entry.batch_id for read in batches[step].trained] for step in (1, 2)] == [["0-0"], ["0-2", "1-3"]]
    assert batches_of(run.kafka, first.position, [second]).keys() == {2}

    other = recorded_step(run, 2, ("0-2", 4, "trained"), ("1-9", 6, "trained"))
    with pytest.raises(TopicError, match=r"batch 1-9 of step 2 had 16 rollouts; offset 6 of batch-index now names 1-3"):
        batches_of(run.kafka, 0, [first, other])
    with pytest.raises(TopicError, match=r"steps 2 to 2 cannot .*: no step names batch 1-1"):
        batches_of(run.kafka, 2, [second])

    places = {entry.batch_id: (entry.partition, entry.offset) for entry in run.read("batch-index")}  # type: ignore[attr-defined]
    partition, offset = places["1-3"]
    delete(run, "batches", partition, offset + 1)
    with pytest.raises(TopicError, match=r"batch 1-3 of step 2 was deleted from batches\[1\]\. Begin at a later"):
        batches_of(run.kafka, 0, [first, second])
    delete(run, "batch-index", 0, 3)
    with pytest.raises(
        TopicError, match=r"batch 0-0 of step 1 is no longer at offset 0 .*; batch 1-1 of step 1 is no longer .*1-3"
    ):
        batches_of(run.kafka, 0, [first, second])


def delete(run: RealRun, topic: str, partition: int, before: int) -> None:
    client = clients.admin(run.kafka)
    [deleted] = client.delete_records([TopicPartition(run.topic(topic), partition, before)]).values()
    assert deleted.result(300).low_watermark == before


def test_the_publishers_steps_are_known_by_what_it_had_read_and_followed(real_run: RealRun) -> None:
    run = real_run
    provisioning.apply(run.kafka, run.topics, run.name)
    with closing(StepLog(run.kafka, run.name, "default")) as log:

        def put(number: int, position: int) -> None:
            log.commit([log.record(replace(recorded_step(run, number), position=position))])

        put(0, 0)
        put(1, 4)
        with PublisherSteps(run.kafka, run.name) as steps:
            assert [steps.completed_at(offset) for offset in (0, 3, 4, 100)] == [0, 0, 1, 1]
            put(2, 10)
            eventually(lambda: steps.completed_at(100) == 2, 60, "the new step is read")
            assert [steps.completed_at(offset) for offset in (3, 9, 10)] == [0, 1, 2]
    with PublisherSteps(run.kafka, run.name) as again:
        assert again.completed_at(9) == 1
