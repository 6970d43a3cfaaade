"""Kafka's own tools on a run's topics, as docs/commands.md shows them, compared with `rollstream cat`."""

import json
import re

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.transactions import TransactionalProducer
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.kafka_tools import output_of
from tests.support.pages import blocks, page
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

SHOWN = [
    line
    for block in blocks(page("commands"), "sh")
    for line in block.replace("\\\n", "").splitlines()
    if line.startswith("kafka-")
]


def kafkas(run: RealRun, line: str) -> str:
    """Output of a command of the page, for this run on this broker."""
    here = {"127.0.0.1:9092": run.kafka.bootstrap_servers, "main.": f"{run.name}."}
    for shown, real in here.items():
        line = line.replace(shown, real)
    return output_of(line)


def consumed(run: RealRun, line: str) -> str:
    """Output of a consumer that ends when nothing arrives for a while, run until it has seen a record."""
    return eventually(lambda: out if "Offset:" in (out := kafkas(run, line)) else "", 120, "a record")


def records(run: RealRun, *words: str) -> list[tuple[int, int]]:
    done = run.said("cat", *words, "--json")
    assert done.returncode == 0, done.stderr
    return [(record["partition"], record["offset"]) for record in map(json.loads, done.stdout.splitlines())]


@pytest.mark.long  # Starts Kafka's tools six times, and fetches them once.
def test_the_commands_of_the_page_show_what_it_says(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=1)
    run.prepare()
    group = run.start("group")
    run.send(rollout(f"x{n}", member) for n in range(8) for member in range(4))

    settled(run, batched=32, in_flight=0)
    # Write in a transaction, as a labeler does.
    producer = TransactionalProducer(run.kafka, f"{run.name}/test")
    producer.start()
    with producer.transaction() as transaction:
        for n in range(16):
            value = encode(rollout(f"y{n // 4}", n % 4))
            transaction.send(run.topic("rollouts"), value, encode_key("env", f"y{n // 4}"))
    settled(run, batched=48, in_flight=0)
    group.terminate()
    assert group.wait(300) == 0
    with producer.transaction(commit=False) as transaction:
        transaction.send(run.topic("batches"), b"never", b"aborted", partition=0)
        transaction.flush(60)
    producer.close()

    [consumer] = [line for line in SHOWN if "console-consumer" in line]
    outputs = {line.split()[0]: consumed(run, line) if line == consumer else kafkas(run, line) for line in SHOWN}
    assert len(outputs) == 4
    committed = [message.offset for message in read_to_end(run.kafka, run.topic("batches"))]
    offsets = [int(digits) for digits in re.findall(r"Offset:(\d+)", outputs["kafka-console-consumer.sh"])]
    assert offsets == committed
    assert "aborted" not in outputs["kafka-console-consumer.sh"]
    everything = consumed(run, consumer.replace("read_committed", "read_uncommitted"))
    assert everything.count("Offset:") == len(committed) + 1
    assert "aborted" in everything
    assert records(run, "batches") == [(0, offset) for offset in committed]
    assert len(records(run, "batches", "--uncommitted")) == len(committed) + 1
    assert records(run, "batches", "-o", "-1", "--uncommitted")[0] > (0, committed[-1])
    span = ("-o", str(committed[0] + 1), "--to", str(committed[2]))
    assert records(run, "batches", *span) == [(0, committed[1])]

    [row] = [line.split() for line in outputs["kafka-consumer-groups.sh"].splitlines() if run.topic("rollouts") in line]
    position, end, lag = (int(row[i]) for i in (3, 4, 5))
    assert (end - position, lag) == (1, 1), row
    assert outputs["kafka-get-offsets.sh"].split() == [f"{run.topic('rollouts')}:0:{end}"]
    assert ledger(run.kafka, run.name).unread == 0
    assert "ProducerId" in outputs["kafka-transactions.sh"]
