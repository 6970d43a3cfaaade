"""A writer of more records than a producer's queue holds waits for room in the queue."""

import dataclasses

from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun, rollout

LITTLE_ROOM = {"kafka__client.queue.buffering.max.messages": 3}


def test_eighty_letters_of_a_megabyte_are_sent_again(real_run: RealRun) -> None:
    run = real_run.prepare()
    big = dataclasses.replace(rollout(), extra={"notes": "x" * 1_000_000})
    sender = Sender(clients.producer(run.kafka))
    for offset in range(80):
        key = encode_key("env", "x")
        headers = {
            "__streams.errors.topic": run.topic("rollouts"),
            "__streams.errors.partition": "0",
            "__streams.errors.offset": str(offset),
        }
        sender.send(run.topic("dead-letters"), encode(big), key, partition=0, headers=headers)
    sender.flush(120)
    process = run.start("dlq", "redrive")
    assert process.wait(300) == 0, run.log_of(process)
    assert len(run.read("rollouts")) == 80


def test_a_replay_into_another_run_waits_for_room(real_run: RealRun) -> None:
    run = real_run.prepare()
    for version in range(1, 20):
        run.publish_version(version)
    process = run.start("replay", "--into", f"{run.name}-into", topics__weights_partitions=3, **LITTLE_ROOM)
    assert process.wait(300) == 0, run.log_of(process)
    there = dataclasses.replace(run, name=f"{run.name}-into")
    assert len(there.read("policies")) == 20
    assert topic_admin.partitions_of(run.kafka, there.topic("weights")) == 3, "the topics have the settings of the run"
