"""Requests to the coordinator of a group while its broker is down, in a process that lives on when it is back."""

import subprocess
import sys

import pytest

from rollstream.infra.broker.broker import LocalBroker
from rollstream.topics.kafka.groups import group_positions
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition
from tests.support.runs import RealRun

PROGRAM = """
import sys, threading
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka.groups import group_positions, members
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition

# Clients that were given up must connect again while this process is alive.
soon = {"reconnect.backoff.max.ms": "200"}
kafka = KafkaConfig(bootstrap_servers=sys.argv[1], transaction_timeout_s=1.0, client=soon)
group, topic = sys.argv[2:]

def ask():
    with Reader(kafka, group=group) as reader:
        reader.commit([GroupPosition(topic, 0, 5)], "committing")
    return members(kafka, group), [at.offset for at in group_positions(kafka, group, {topic: [0]})]

refused = []

def refuse(call):
    try:
        call()
    except BrokerUnavailable as error:
        refused.append(error)

print(*ask(), flush=True)
input()
with Reader(kafka, group=group) as reader:
    calls = [
        lambda: reader.commit([GroupPosition(topic, 0, 6)], "committing"),
        lambda: members(kafka, group),
        lambda: group_positions(kafka, group, {topic: [0]}),
    ]
    threads = [threading.Thread(target=refuse, args=[call]) for call in calls]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(len(refused), flush=True)
input()
for _ in range(100):
    last = ask()
print(*last, flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_process_outlives_the_outage_of_the_coordinator_that_it_asks(
    fault_run: RealRun, breakable: LocalBroker
) -> None:
    run = fault_run.prepare()
    group, topic = f"{run.name}.archive", f"{run.name}.rollouts"
    arguments = [sys.executable, "-c", PROGRAM, breakable.bootstrap_servers, group, topic]
    with subprocess.Popen(arguments, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "0 [5]\n"
        breakable.kill()
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "3\n"
        breakable.restart()
        print(file=process.stdin, flush=True)
        # The commit that was given up may still take effect.
        assert process.stdout.readline() in ("0 [5]\n", "0 [6]\n")
        process.stdin.close()
        assert process.wait(60) == 0
    with Reader(run.kafka, group=group) as reader:
        reader.commit([GroupPosition(topic, 0, 7)], "committing")
    assert [position.offset for position in group_positions(run.kafka, group, {topic: [0]})] == [7]
