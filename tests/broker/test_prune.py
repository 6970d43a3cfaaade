"""Pruning a small real run: only what nobody needs is deleted, and everything that is kept stays consistent."""

import json
import os
import signal
import subprocess
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.records.learner_position import LearnerPosition
from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder
from rollstream.consumers.learner_retirement import retire
from rollstream.consumers.step_log import StepLog, read_steps
from rollstream.pipeline.audit.ledger import Ledger
from rollstream.pipeline.audit.pruning_plan import Deletion, plan
from rollstream.pipeline.audit.verification import index_of, verify
from rollstream.pipeline.tools.prune import delete, read_positions
from rollstream.pipeline.tools.replay import replay
from rollstream.producers.journal_tailer import JournalTailer
from rollstream.topics.codec import encode
from rollstream.topics.errors import Fenced, StateRefused
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.keys import encode_key
from rollstream.topics.records import BatchUse, LearnerStep, PolicyManifest
from tests.support.batches import indexed_batches, random_batch, send_batches
from tests.support.command_line import answer_of
from tests.support.ledgers import in_both_forms
from tests.support.runs import SMALL_LEARNER, RealRun, rollout, with_batches
from tests.support.waiting import eventually

EXAMPLES = count()


def feed(run: RealRun, groups: int) -> None:
    """Send whole groups of four, and wait for the first batches of them."""
    before = len(index_of(run.kafka, run.name))
    names = [f"g{next(EXAMPLES)}" for _ in range(groups)]
    run.send(rollout(name, member) for name in names for member in range(4))
    eventually(lambda: len(index_of(run.kafka, run.name)) > before, 60, "another batch", every_s=0.1)


def settled(run: RealRun, in_flight: int = 0) -> Ledger:
    def book() -> Ledger | None:
        books = in_both_forms(run)
        return books if not books.unread and in_flight == books.in_flight else None

    return eventually(book, 60, f"every record of run {run.name} in its place", every_s=0.2)


def learn(run: RealRun, name: str, read: int, at: float = 0.0, resumes_at: int | None = None) -> None:
    """Write a learner's step that trained on the first `read` entries of the index, and may read from `resumes_at` on,
    by default from the next entry on."""
    # The marker of the last transaction may come after its commit was answered.
    index = run.topic("batch-index")
    eventually(lambda: len(list(read_to_end(run.kafka, index))) >= read, 60, f"{read} entries of the index")
    entries = list(index_of(run.kafka, run.name).values())[:read]
    messages = list(read_to_end(run.kafka, index))[:read]
    uses = tuple(
        BatchUse(batch_id=entry.batch_id, index_offset=message.offset, rows=entry.rollouts, use="trained")
        for entry, message in zip(entries, messages, strict=True)
    )
    step = LearnerStep(
        learner=name,
        step=1,
        input_run=run.name,
        uses=uses,
        position=messages[-1].offset + 1,
        policy_version=1,
        params_digest="ab" * 32,
        trained_total=sum(use.rows for use in uses),
        skipped_total=0,
        timestamp=at,
        resumes_at=messages[-1].offset + 1 if resumes_at is None else resumes_at,
    )
    run.send_bytes("steps", encode(step), encode_key(name, 1))


def checkpoint(run: RealRun, learner: str, position: int) -> Path:
    """Write the part of a checkpoint that a fork reads, as orbax lays it out, and return the directory."""
    directory = run.directory / "checkpoints"
    path = directory / run.name / learner / "1" / "meta" / "metadata"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"position": position, "oldest": -1}))
    return directory


def learners_of(run: RealRun) -> dict[str, int]:
    """The first offset of the index that each learner may still read."""
    return dict(read_positions(run.kafka, run.name, run.grouper.group_id(run.name)).learners)


def planned(run: RealRun, keep: int) -> dict[tuple[str, int], Deletion]:
    """The plan of a prune, computed in this process."""
    positions = read_positions(run.kafka, run.name, run.grouper.group_id(run.name))
    return {(d.topic, d.partition): d for d in plan(positions, keep_batches=keep)}


def prunable(run: RealRun, topic: str, keep: int) -> bool:
    """Whether a prune would delete records of a topic."""
    return any(deletion.offsets for (name, _), deletion in planned(run, keep).items() if name == topic)


def prune(run: RealRun, *words: str) -> dict[tuple[str, int], dict[str, Any]]:
    done = rollstream(run, "prune", *words, "--json")
    assert done.returncode == 0, done.stderr
    return {(row["topic"], row["partition"]): row for row in json.loads(done.stdout)["plan"]}


def rollstream(run: RealRun, *words: str) -> subprocess.CompletedProcess[str]:
    return answer_of(run.directory, *run.command(*words)[4:])


def begins(run: RealRun) -> dict[tuple[str, int], int]:
    return {
        (topic, partition): low
        for topic in ("rollouts", "journal", "batch-index", "batches")
        for partition, (low, _end) in topic_admin.bounds(run.kafka, run.topic(topic)).items()
    }


def test_junk_stops_no_plan_and_a_learner_that_another_has_replaced_is_named(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(8)])
    learn(run, "gone", 2, at=1e9)
    learn(run, "main", 6, at=2e9)
    other = run.beside("other")
    provisioning.apply(other.kafka, other.topics, other.name)
    for place, value in ((run, b"junk"), (run, None), (other, b"junk")):
        place.send_bytes("steps", value, b"no key")
    run.send_bytes("batch-index", b"junk", b"key")

    where = ("--dry-run", "--keep-batches", "0")
    done = rollstream(run, "prune", *where, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {name: learner["replaced_by"] for name, learner in answer["learners"].items()} == {
        "learner gone": "main",
        "learner main": "",
    }
    # On a broker that tests share there may be junk of other runs, too.
    skipped = Counter(line.partition("[")[0] for line in answer["skipped"])
    assert (skipped[run.topic("steps")], skipped[other.topic("steps")], skipped[run.topic("batch-index")]) == (2, 1, 1)
    assert answer["archive_on_record"] is False
    text = rollstream(run, "prune", *where).stdout
    assert "no archiver is on record: none runs" in text
    assert "learner gone: its last step is 1, of 2001-09-09T01:46:40.000Z" in text
    assert f"learner main has published into run {run.name} since" in text
    assert "records could not be read and were ignored, the first: " in text


def test_positions_of_another_group_are_read(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(0, partition=0)])
    with Reader(run.kafka, group=f"{run.name}.reader") as reader:
        reader.commit([GroupPosition(run.topic("batches"), 0, 1)], "committing")
    positions = read_positions(run.kafka, run.name, run.grouper.group_id(run.name))
    assert positions.groups[f"{run.name}.reader"] == {("batches", 0): 1}


@pytest.mark.long
def test_a_learner_on_record_holds_back_what_it_may_read_again(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(8)])
    ends = [message.offset + 1 for message in read_to_end(run.kafka, run.topic("batch-index"))]
    params = StepParams("new.checksum", None)

    with StepRecorder(LearnerConfig(take_over=True), run.kafka, run.name, "{}") as recorder:
        recorder.resumes_from(ends[1])
        made = recorder.record(1, (), ends[3], {}, params, LearnerPosition())
        assert learners_of(run) == {"learner default": ends[1]}
        recorder.resumes_from(ends[2])
        # The records of a step that waits, and of a buffer that holds older rollouts, name it, too.
        recorder.record_skips(2, (), LearnerPosition().after(made))
        assert learners_of(run) == {"learner default": ends[2]}
        recorder.record(2, (), ends[4], {}, params, LearnerPosition().after(made), oldest=ends[0])
        assert learners_of(run) == {"learner default": ends[0]}
        recorder.record(3, (), ends[5], {}, params, LearnerPosition().after(made))
        assert learners_of(run) == {"learner default": ends[2]}

    # Its checkpoints are lost, so it begins again.
    with StepRecorder(LearnerConfig(take_over=True), run.kafka, run.name, "{}") as recorder:
        recorder.resumes_from(0)
        assert learners_of(run) == {"learner default": 0}
        recorder.resumes_from(ends[1])
        recorder.record(1, (), ends[3], {}, params, LearnerPosition())
        assert learners_of(run) == {"learner default": 0}
        for step, end in ((2, ends[4]), (3, ends[5])):
            recorder.record(step, (), end, {}, params, LearnerPosition())
        assert learners_of(run) == {"learner default": ends[1]}


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


def test_retiring_a_learner_that_was_replaced_does_not_fence_its_successor(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(2)])
    learn(run, "old", 1, at=1e9)
    manifest = PolicyManifest(
        version=1, learner="new", step=1, epoch="e", tensors=(), chunks=(), digest="", created=2e9
    )  # fmt: skip
    with closing(StepLog(run.kafka, run.name, "new", take_over=True)) as log:
        log.commit([(run.topic("policies"), encode_key(manifest.version), encode(manifest))])

        retire(run.kafka, run.name, "old", "it was replaced")

        log.commit([log.record(replace(read_steps(run.kafka, run.name, "old")[1], learner="new", step=2))])
    assert sorted(read_steps(run.kafka, run.name, "new")) == [2]


@pytest.mark.long
def test_a_retired_learner_holds_nothing_back_and_is_refused_until_it_is_resumed(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(8)])
    learn(run, "main", 6, at=1e9)
    learn(run, "gone", 2, at=2e9)
    sums = [sum(entry.rollouts for entry in list(index_of(run.kafka, run.name).values())[:n]) for n in range(9)]

    before = learners_of(run)
    assert before["learner gone"] < before["learner main"]
    with closing(StepLog(run.kafka, run.name, "gone")) as log, JournalTailer(run.kafka, run.name) as tailer:
        assert tailer.progress.consumed == sums[2]
        unknown = rollstream(run, "learner", "retire", "nobody")
        assert (unknown.returncode, "learners on record: gone, main" in unknown.stderr) == (2, True), unknown.stderr
        done = rollstream(run, "learner", "retire", "gone", "--reason", "it diverged")
        assert done.returncode == 0, done.stderr
        assert learners_of(run) == {"learner main": before["learner main"]}
        eventually(lambda: tailer.progress.consumed == sums[6], 60, "the retired learner left out")
        with pytest.raises(Fenced):
            log.commit([log.record(read_steps(run.kafka, run.name, "gone")[1])])
    with pytest.raises(StateRefused, match=r"is retired \(it diverged\).*rollstream steer learner resume gone"):
        StepLog(run.kafka, run.name, "gone", take_over=True)
    learners = in_both_forms(run).learners
    assert (learners["gone"]["retired"], "waiting" in learners["gone"]) == (True, False)
    assert ("retired" in learners["main"], learners["main"]["waiting"]) == (False, 2)
    assert "(retired)" in rollstream(run, "ledger").stdout
    # The other learner can open its log without `take_over`.
    StepLog(run.kafka, run.name, "main").close()

    assert rollstream(run, "learner", "resume", "gone").returncode == 0
    assert learners_of(run) == before
    StepLog(run.kafka, run.name, "gone", take_over=True).close()


@pytest.mark.long
def test_a_fork_holds_its_batches_before_its_first_step_until_it_is_retired(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(8)])
    learn(run, "main", 2)
    ends = [message.offset + 1 for message in read_to_end(run.kafka, run.topic("batch-index"))]
    other = run.beside("fork")
    directory = f"learner.checkpoint.directory={checkpoint(run, 'main', ends[1])}"
    words = ("fork", "--from-step", "1", "--learner", "main", "--into", other.name, "--set", directory)
    done = rollstream(run, *words)
    assert done.returncode == 0, done.stderr
    learn(run, "main", 8)

    both = {"learner main": ends[7], f"learner {other.name}/default (not started)": ends[1]}
    assert learners_of(run) == both
    assert rollstream(other, "learner", "retire", "default").returncode == 0
    assert learners_of(run) == {"learner main": ends[7]}
    assert rollstream(other, "learner", "resume", "default").returncode == 0
    assert learners_of(run) == both
    # Its own steps count from then on.
    step = replace(read_steps(run.kafka, run.name, "main")[1], learner="default", position=ends[5], resumes_at=ends[5])
    other.send_bytes("steps", encode(step), encode_key("default", 1))
    assert learners_of(run) == {"learner main": ends[7], f"learner {other.name}/default": ends[5]}

    learn(run, "main", 2)
    topic_admin.delete_records(run.kafka, {(run.topic("batch-index"), 0): ends[2]})
    late = rollstream(run, *(f"{other.name}-late" if word == other.name else word for word in words))
    assert late.returncode == 2
    assert f"from offset {ends[1]}, and `rollstream prune` has deleted the entries below {ends[2]}" in late.stderr


@pytest.mark.long
def test_learners_of_other_runs_hold_back_what_their_steps_name(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(8)])
    ends = [message.offset + 1 for message in read_to_end(run.kafka, run.topic("batch-index"))]
    learn(run, "main", 8, resumes_at=ends[6])
    other = run.beside("other")
    provisioning.apply(other.kafka, other.topics, other.name)
    step = replace(read_steps(run.kafka, run.name, "main")[1], learner="mine", resumes_at=ends[3])
    other.send_bytes("steps", encode(step), encode_key("mine", 1))
    assert learners_of(run) == {"learner main": ends[6], f"learner {other.name}/mine": ends[3]}


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
    last = settled(run)
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
        last = settled(run)
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
