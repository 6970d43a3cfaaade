"""Whoever writes more than a producer's queue holds waits for room in it."""

import dataclasses

from tests.runs import RealRun, rollout
from topics import clients
from topics.codec import encode
from topics.keys import encode_key

LITTLE_ROOM = {"kafka__client.queue.buffering.max.messages": 3}


def test_eighty_letters_of_a_megabyte_are_sent_again(real_run: RealRun) -> None:
    run = real_run.prepare()
    big = dataclasses.replace(rollout(), extra={"notes": "x" * 1_000_000})
    producer = clients.producer(run.kafka)
    for offset in range(80):
        key = encode_key("env", "x")
        headers = {
            "__streams.errors.topic": run.topic("rollouts"),
            "__streams.errors.partition": "0",
            "__streams.errors.offset": str(offset),
        }
        clients.produce(producer, run.topic("dead-letters"), encode(big), key, partition=0, headers=headers)
    assert producer.flush(60) == 0
    process = run.start("dlq", "redrive")
    assert process.wait(120) == 0, run.log_of(process)
    assert len(run.read("rollouts")) == 80


def test_a_replay_into_another_run_waits_for_room(real_run: RealRun) -> None:
    run = real_run.prepare()
    for version in range(1, 20):
        run.publish_version(version)
    process = run.start("replay", "--into", f"{run.name}-into", **LITTLE_ROOM)
    assert process.wait(60) == 0, run.log_of(process)
    there = dataclasses.replace(run, name=f"{run.name}-into")
    assert len(there.read("policies")) == 20
