"""What an open transaction hides is waited for by whoever must not write it twice."""

import subprocess
import threading

import pytest

from tests.runs import RealRun, rollout
from tests.waiting import eventually
from topics import clients
from topics.codec import encode
from topics.keys import encode_key
from topics.open_transactions import await_decided, undecided


def dead_letter(run: RealRun) -> None:
    """A dead letter at offset 0 that may be sent again as it is."""
    producer = clients.producer(run.kafka)
    headers: dict[str, str | bytes | None] = {
        "__streams.errors.topic": run.topic("rollouts"),
        "__streams.errors.partition": "0",
        "__streams.errors.offset": "0",
    }
    producer.produce(run.topic("dead-letters"), encode(rollout()), encode_key("env", "x"), 0, headers=headers)
    assert producer.flush(30) == 0


def redriving(run: RealRun) -> subprocess.Popen[bytes]:
    """`dlq redrive` that waits, or is over."""
    process = run.start("dlq", "redrive", "0")
    eventually(lambda: process.poll() is not None or "transaction_open" in run.log_of(process), 60, "it waits or ends")
    return process


def test_a_letter_is_sent_again_once_while_a_foreign_transaction_stands_open(real_run: RealRun) -> None:
    run = real_run.prepare()
    dead_letter(run)
    with run.open_transaction("dead-letters"):
        processes = [redriving(run) for _ in range(3)]
    # The last to start has its turn. Those before it are told so, by the coordinator or by the note of the last.
    assert processes[-1].wait(60) == 0
    assert {process.wait(60) for process in processes[:-1]} <= {1, 2}
    again = run.start("dlq", "redrive", "0")
    assert again.wait(60) == 1
    assert "was redriven at" in run.log_of(again)
    assert len(run.read("rollouts")) == 1


def test_what_is_written_after_the_question_is_not_waited_for(
    real_run: RealRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = real_run.prepare()
    with run.open_transaction("journal") as producer:
        [part] = undecided(run.kafka, run.topic("journal")).values()
        assert (part.start, part.end) == (2, 3), "generation 0 and its marker lie before it"
        asked = threading.Thread(target=await_decided, args=(run.kafka, run.topic("journal"), "nothing was done", 60.0))
        asked.start()
        eventually(lambda: "transaction_open" in caplog.text, 30, "it waits for what is open now")
        producer.commit_transaction(30)
        producer.begin_transaction()
        producer.produce(run.topic("journal"), b"foreign", b"foreign", 0)
        producer.flush(30)
        asked.join(30)
        assert not asked.is_alive()
