"""Writers that must not write a record twice wait for the end of a transaction that hides records."""

import subprocess
import threading

import pytest

from rollstream.pipeline.tools.dlq import read
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.open_transactions import await_decided, undecided
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

POISON = b"\xc3\x01 not a record"


def dead_letter(run: RealRun, partition: int = 0) -> None:
    """Write a dead letter of offset 0 of a partition, which can be sent again unchanged."""
    producer = clients.producer(run.kafka)
    headers: dict[str, str | bytes | None] = {
        "__streams.errors.topic": run.topic("rollouts"),
        "__streams.errors.partition": str(partition),
        "__streams.errors.offset": "0",
    }
    producer.produce(run.topic("dead-letters"), encode(rollout()), encode_key("env", "x"), partition, headers=headers)
    assert producer.flush(120) == 0


def redriving(run: RealRun) -> subprocess.Popen[bytes]:
    """Start `dlq redrive`, and return it once it waits or has ended."""
    process = run.start("dlq", "redrive", "0:0")
    eventually(lambda: process.poll() is not None or "transaction_open" in run.log_of(process), 60, "it waits or ends")
    return process


def test_a_letter_is_sent_again_once_while_a_foreign_transaction_stands_open(real_run: RealRun) -> None:
    run = real_run.prepare()
    dead_letter(run)
    with run.open_transaction("dead-letters"):
        processes = [redriving(run) for _ in range(3)]
    # The process that started last sends the letter; the coordinator or its note tells the others.
    assert processes[-1].wait(300) == 0
    assert {process.wait(300) for process in processes[:-1]} <= {1, 2}
    again = run.start("dlq", "redrive", "0:0")
    assert again.wait(300) == 1
    assert "was redriven at" in run.log_of(again)
    assert len(run.read("rollouts")) == 1


def test_letters_of_a_partition_are_seen_and_sent_while_a_transaction_hides_those_of_another(real_run: RealRun) -> None:
    run = real_run.prepare()
    with run.open_transaction("dead-letters"):
        run.start("group")
        run.send_bytes("rollouts", POISON, encode_key("env", "x"), 1)
        book = settled(run, dead_lettered=1)
        assert (book.problems, book.undecided) == ([], [])
        [letter] = read(run.kafka, run.name)
        assert (letter.name, letter.partition, letter.value) == ("1:0", 1, POISON)
        dead_letter(run, partition=1)
        sound = read(run.kafka, run.name)[-1].name
        process = run.start("dlq", "redrive", sound)
        assert process.wait(300) == 0, run.log_of(process)
        assert [letter.name for letter in read(run.kafka, run.name) if letter.redriven] == [sound]


def test_what_is_written_after_the_question_is_not_waited_for(
    real_run: RealRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = real_run.prepare()
    with run.open_transaction("journal") as producer:
        [part] = undecided(run.kafka, run.topic("journal")).values()
        assert (part.start, part.end) == (2, 3), "generation 0 and its marker lie before it"
        thread = threading.Thread(
            target=await_decided, args=(run.kafka, run.topic("journal"), "nothing was done", 60.0)
        )
        thread.start()
        eventually(lambda: "transaction_open" in caplog.text, 60, "it waits for what is open now")
        producer.commit_transaction(120)
        producer.begin_transaction()
        producer.produce(run.topic("journal"), b"foreign", b"foreign", 0)
        producer.flush(120)
        thread.join(300)
        assert not thread.is_alive()
