"""Pruning a small real run: only what nobody needs is deleted, and everything that is kept stays consistent."""

import json
import subprocess
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder
from rollstream.consumers.weights.step_log import StepLog, read_steps
from rollstream.pipeline.audit.verification import index_of
from rollstream.pipeline.tools.learner import retire
from rollstream.pipeline.tools.prune import read_positions
from rollstream.producers.flow.tailers import JournalTailer
from rollstream.topics.control.named_records import write
from rollstream.topics.control.steering import DONE, DRAIN, WANTED
from rollstream.topics.errors import Fenced, StateRefused
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.transactions import transactional_id
from rollstream.topics.records import BatchUse, DrainRequest, LearnerStep, PolicyManifest
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.batches import random_batch, send_batches
from tests.support.late_markers import committed_at_second_look
from tests.support.ledgers import in_both_forms
from tests.support.runs import RealRun
from tests.support.waiting import eventually


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


def prune(run: RealRun, *words: str) -> dict[tuple[str, int], dict[str, Any]]:
    done = rollstream(run, "prune", *words, "--json")
    assert done.returncode == 0, done.stderr
    return {(row["topic"], row["partition"]): row for row in json.loads(done.stdout)["plan"]}


def rollstream(run: RealRun, *words: str) -> subprocess.CompletedProcess[str]:
    return run.said(*words)


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
def test_a_learner_whose_last_step_no_reader_sees_yet_is_fenced_when_it_is_retired(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number) for number in range(2)])
    learn(run, "gone", 1, at=1e9)
    learn(run, "main", 1, at=2e9)
    producer = clients.transactional_producer(run.kafka, transactional_id(run.name, "learner"))
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(run.topic("steps"), encode(replace(read_steps(run.kafka, run.name, "gone")[1], timestamp=3e9)))
    producer.flush(120)
    committed_at_second_look(producer, monkeypatch)
    retire(run.kafka, run.name, "gone", "it diverged")
    producer.begin_transaction()
    producer.produce(run.topic("steps"), b"late")
    with pytest.raises(KafkaException):
        producer.commit_transaction(120)


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


def test_a_fork_with_other_partitions_says_if_the_old_run_is_not_drained(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number) for number in range(2)])
    learn(run, "main", 2)
    end = next(read_to_end(run.kafka, run.topic("batch-index"))).offset + 1
    directory = f"learner.checkpoint.directory={checkpoint(run, 'main', end)}"
    words = ("fork", "--from-step", "1", "--learner", "main", "--set", directory)
    assert "is not drained" not in rollstream(run, *words, "--into", run.beside("same").name).stderr
    for drains, notes in (({WANTED: DrainRequest(wall_time=1.0)}, 1), ({DONE: DrainRequest(wall_time=1.0)}, 0)):
        write(run.kafka, run.name, DRAIN, drains)
        forked = rollstream(run, *words, "--into", run.beside(f"fork{notes}").name, "--partitions", "3")
        assert forked.returncode == 0, forked.stderr
        assert forked.stderr.count(f"note: run {run.name} is not drained") == notes


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
