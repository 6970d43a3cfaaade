"""`rollstream steer stop --drain` on a broker: grouping batches what is complete, cancels the rest, and ends."""

import time
from dataclasses import replace

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.control import steering
from rollstream.pipeline.run.draining import has_open_producers, is_in_flight, newest_components
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Metrics, TrainingBatch
from rollstream.topics.wire.codec import encode
from tests.support.command_line import answer_of
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually


def said(run: RealRun, *words: str) -> str:
    answer = answer_of(run.directory, "stop", *words, *run.command()[4:])
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def worker_has_ended(run: RealRun) -> None:
    """Write a worker's last metrics: without them, a drain waits until no worker can be running."""
    write_metrics(run, running=0.0)


def write_metrics(run: RealRun, **values: float) -> None:
    labels = {"role": "env"}
    record = Metrics(component="env-0", timestamp=time.time(), labels=labels, values=values)
    run.send_bytes("metrics", encode(record), b"env-0")


def drain(run: RealRun) -> str | None:
    wanted: str | None = steering.state(run.kafka, run.name)["drain"]
    return wanted


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    # No batch is cut by size or by age, so every batch is cut by the drain.
    real_run.grouping = replace(real_run.grouping, batch_rollouts=100, max_batch_age_s=10_000.0)
    return real_run.prepare()


def test_what_is_complete_is_batched_and_what_is_not_is_cancelled(run: RealRun) -> None:
    grouping = run.start("group", "--ordinal", "0")
    run.send(rollout(f"x{example}", member) for example in range(6) for member in range(4))
    run.send(rollout("half", member) for member in range(2))
    assert "train as long as their settings say" in said(run)
    assert "is being drained" in said(run, "--drain")
    worker_has_ended(run)
    drained = drain(run)
    assert "is being drained" in said(run, "--drain"), "it may be asked for again"
    assert (drained, drain(run)) == ("wanted", "wanted")
    eventually(lambda: drain(run) == "done", 180, "the end of grouping")
    assert grouping.wait(120) == 0, "grouping ends by itself"
    batches = [record for record in run.read("batches") if isinstance(record, TrainingBatch)]
    assert {batch.cut for batch in batches} == {"drain"}
    assert sum(len(batch.uids) for batch in batches) == 24
    assert not is_in_flight(run.kafka, run.name, run.grouper)
    books = ledger(run.kafka, run.name)
    assert (books.problems, books.in_flight, books.unread, books.dropped) == ([], 0, 0, {"cancelled": 2})
    assert "is drained" in said(run)
    assert "train as long as their settings say" in said(run, "--withdraw")
    # A later drain does not mistake the end of this one for its own.
    assert (drain(run), "is being drained" in said(run, "--drain"), drain(run)) == (None, True, "wanted")


def test_a_drain_does_not_wait_for_a_worker_that_was_killed_once_another_takes_its_place(run: RealRun) -> None:
    write_metrics(run, running=1.0)
    said(run, "--drain")
    assert has_open_producers(newest_components(run.kafka, run.name))
    assert run.start("env", "--ordinal", "0").wait(120) == 0, "it begins nothing"
    assert not has_open_producers(newest_components(run.kafka, run.name))


def test_nothing_is_cut_for_a_drain_that_is_withdrawn(run: RealRun) -> None:
    run.start("group", "--ordinal", "0")
    run.send(rollout("x", member) for member in range(4))
    said(run, "--drain")
    said(run, "--withdraw")
    run.send(rollout("y", member) for member in range(4))
    settled(run, in_flight=8)
    assert (drain(run), run.read("batches")) == (None, [])


def test_a_drain_that_makes_no_sense_is_refused(run: RealRun) -> None:
    with pytest.raises(ConfigurationError, match="true, or false to withdraw"):
        steering.record(run.kafka, run.name, {"command": "drain", "wanted": 1})
