"""Pruning a small real run: only what nobody needs is deleted, and everything that is kept stays consistent."""

import os
import signal
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.audit.ledger import Ledger
from rollstream.pipeline.audit.pruning_plan import Deletion, plan
from rollstream.pipeline.audit.verification import index_of, verify
from rollstream.pipeline.tools.prune import delete, read_positions
from rollstream.pipeline.tools.replay import replay
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.keys import encode_key
from tests.model.test_prune import learn, learners_of, prune
from tests.support.batches import indexed_batches
from tests.support.ledgers import in_both_forms
from tests.support.runs import SMALL_LEARNER, RealRun, rollout, with_batches
from tests.support.settled import settled
from tests.support.waiting import eventually

EXAMPLES = count()


def feed(run: RealRun, groups: int) -> None:
    """Send whole groups of four, and wait for the first batches of them."""
    before = len(index_of(run.kafka, run.name))
    names = [f"g{next(EXAMPLES)}" for _ in range(groups)]
    run.send(rollout(name, member) for name in names for member in range(4))
    eventually(lambda: len(index_of(run.kafka, run.name)) > before, 60, "another batch", every_s=0.1)


def planned(run: RealRun, keep: int) -> dict[tuple[str, int], Deletion]:
    """The plan of a prune, computed in this process."""
    positions = read_positions(run.kafka, run.name, run.grouper.group_id(run.name))
    return {(d.topic, d.partition): d for d in plan(positions, keep_batches=keep)}


def prunable(run: RealRun, topic: str, keep: int) -> bool:
    """Whether a prune would delete records of a topic."""
    return any(deletion.offsets for (name, _), deletion in planned(run, keep).items() if name == topic)


def begins(run: RealRun) -> dict[tuple[str, int], int]:
    return {
        (topic, partition): low
        for topic in ("rollouts", "journal", "batch-index", "batches")
        for partition, (low, _end) in topic_admin.bounds(run.kafka, run.topic(topic)).items()
    }


@pytest.mark.long
def test_the_steps_of_a_learner_name_what_the_oldest_of_its_checkpoints_needs(real_run: RealRun) -> None:
    run = with_batches(real_run, 16)
    initialise(run.kafka, run.name, run.grouping, run.grouper)
    often = {"learner__checkpoint__every_steps": 1, "learner__checkpoint__keep": 1, "learner__max_steps": 8}
    learner = run.start("learn", **SMALL_LEARNER, **often)
    assert learner.wait(300) == 0, run.log_of(learner)[-3000:]
    steps = read_steps(run.kafka, run.name, "default")
    # The last step was recorded when the checkpoint of step 7 was complete, or that of step 6 was still kept.
    assert 0 < steps[6].position <= steps[8].resumes_at <= steps[7].position
    assert all(0 <= step.resumes_at <= step.position for step in steps.values())
    assert learners_of(run) == {"learner default": steps[8].resumes_at}


def figures_of(book: Ledger) -> dict[str, Any]:
    """The figures of a ledger, without the offsets of its configurations, which pruning moves."""
    figures = book.as_dict()
    configurations = [{name: value for name, value in each.items() if name != "since"} for each in book.configurations]
    return figures | {"configurations": configurations}


@pytest.mark.long
def test_a_pruned_run_restores_after_a_kill_goes_on_balances_and_verifies(real_run: RealRun) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=0.3, group_deadline_s=600.0, horizon_s=1.0)
    run.grouper = GrouperConfig(snapshot_every=10)
    run.prepare()
    process = run.start("group")
    run.send_bytes("rollouts", b"\xc3\x01 not a record", encode_key("env", "poison"))
    # A process that is late takes all that waits in few transactions, and so writes few snapshots.
    while len(index_of(run.kafka, run.name)) < 24 or not prunable(run, "journal", keep=6):
        feed(run, 12)
    run.send([rollout("open", 0)])
    settled(run, in_flight=1)

    # Nobody has read a batch, so no batch is deleted, and nothing that the ledger needs with the batches.
    untouched = planned(run, 0)
    assert {d.offsets for d in untouched.values() if d.topic in ("batches", "batch-index")} == {0}
    assert untouched["batch-index", 0].why == "no learner on record"
    batches = len(index_of(run.kafka, run.name))
    position = [m.offset for m in read_to_end(run.kafka, run.topic("batch-index"))][batches - 20]
    learn(run, "main", batches - 4, resumes_at=position)
    before = in_both_forms(run)
    assert before.balanced, before.problems
    assert before.trained > 0
    where = ("--keep-batches", "6")

    # A foreign consumer group holds back the records that it has yet to read.
    stranger = clients.reader(run.kafka, group=f"{run.name}-stranger")
    stranger.commit(offsets=[TopicPartition(run.topic("rollouts"), 0, 3)], asynchronous=False)
    held = planned(run, 6)["rollouts", 0]
    assert (held.to, held.why) == (3, f"group {run.name}-stranger")
    stranger.commit(offsets=[TopicPartition(run.topic("rollouts"), 0, 10**6)], asynchronous=False)
    stranger.close()

    seen = planned(run, 6)
    assert set(begins(run).values()) == {0}
    done = prune(run, *where, "--yes")
    assert begins(run) == {place: row["to"] for place, row in done.items()}
    assert {p: r["to"] for p, r in done.items()} == {p: d.to for p, d in seen.items()}
    for topic in ("rollouts", "journal", "batch-index", "batches"):
        assert sum(row["offsets"] for row in done.values() if row["topic"] == topic) > 0, topic
    assert done["batch-index", 0]["to"] <= position

    # The books are unchanged; counts stand in for the deleted records.
    after = in_both_forms(run)
    assert after.balanced, after.problems
    figures, known = figures_of(before), figures_of(after)
    assert known.pop("pruned") > figures.pop("pruned") == 0
    assert known == figures
    check_window(run)

    # The grouping process is killed, restores from what was kept, and goes on.
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    run.send(rollout("open", member) for member in range(1, 4))
    run.start("group")
    feed(run, 12)
    last = settled(run, in_flight=0)
    assert last.balanced, last.problems
    assert last.batched == before.batched + 1 + 3 + 48
    assert last.pruned == after.pruned
    check_window(run)
    read = [item.batch.batch_id for item in indexed_batches(run.kafka, run.name, position)]
    names = list(index_of(run.kafka, run.name))
    assert names[-len(read) :] == read
    assert len(read) >= 8
    assert replay(run.kafka, run.name, {}).differing == []
    other = replay(run.kafka, run.name, {"estimator": "grpo"})
    assert other.changed == {"estimator": [["rloo"], "grpo"]}
    assert other.replayed.batches >= 6
    assert planned(run, 6)["batch-index", 0].to <= position

    # Prune again, and further, from a journal whose beginning is gone already. A snapshot is due every ten commits, and
    # a busy process commits several batches at once.
    for _ in range(20):
        deletions = further(run)
        kept = {"rollouts", "batch-index", "batches"} - {d.topic for d in deletions if d.offsets > 0}
        if not kept:
            break
        feed(run, 2)
        last = settled(run, in_flight=0)
    assert not kept
    delete(run.kafka, run.name, deletions)
    book = in_both_forms(run)
    # As if no learner needed anything, this also deleted entries that the learner has yet to read.
    assert book.learners["main"].pop("waiting") <= last.learners["main"].pop("waiting")
    assert figures_of(book) == figures_of(last) | {"pruned": book.pruned}
    assert book.pruned > last.pruned
    verification = verify(run.kafka, run.name, only=list(index_of(run.kafka, run.name))[-6:])
    assert (verification.batches, verification.unverifiable, verification.mismatches) == (6, 0, [])


def further(run: RealRun) -> list[Deletion]:
    """The plan if no learner needed anything."""
    positions = read_positions(run.kafka, run.name, run.grouper.group_id(run.name))
    return plan(replace(positions, learners={"learner ahead": 10**9}), keep_batches=6)


def check_window(run: RealRun) -> None:
    """The newest six batches are verifiable, what only a learner still needs is not, and nothing differs anywhere."""
    names = list(index_of(run.kafka, run.name))
    some = verify(run.kafka, run.name, only=[names[0], *names[-6:]])
    assert (some.batches, some.unverifiable, some.mismatches) == (6, 1, [])
    whole = verify(run.kafka, run.name)
    assert whole.mismatches == []
    assert whole.batches >= 6
    assert whole.batches + whole.unverifiable == len(names)
