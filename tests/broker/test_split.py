"""Splitting a run on a real broker: it goes on with other partitions, and both ledgers close over every record."""

import itertools
import json
import subprocess
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.process.bootstrap import committed_offsets, initialise
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.positions import SOURCE, ensure_positions
from rollstream.consumers.labeling.recovery import recover
from rollstream.pipeline.audit.ledger import Ledger, ledger
from rollstream.pipeline.audit.verification import index_of, verify
from rollstream.pipeline.config import load
from rollstream.pipeline.tools.exclusion_marks import newest, partition_configurations
from rollstream.topics import steering
from rollstream.topics.codec import encode
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.keys import encode_key
from rollstream.topics.records import (
    BatchUse,
    ExcludedBatch,
    LearnerStep,
    MixtureWeight,
    PausedEnvironment,
    Rollout,
    RolloutMetadata,
)
from rollstream.topics.run_splits import moved_from, splits_of
from tests.support.command_line import answer_of
from tests.support.runs import SMALL_LEARNER, RealRun, rollout
from tests.support.waiting import eventually


def ran(run: RealRun, *words: str) -> "subprocess.CompletedProcess[str]":
    return answer_of(run.directory, *run.command(*words)[4:])


def split(run: RealRun, into: str, partitions: int, *words: str) -> Any:
    done = ran(run, "split", "--into", into, "--partitions", str(partitions), "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def successor(run: RealRun, name: str, partitions: int) -> RealRun:
    return replace(run, name=name, topics=TopicsConfig(partitions=partitions))


def settled(run: RealRun, **expected: object) -> Ledger:
    """The ledger, once everything is read and it is as expected."""

    def now() -> Ledger | None:
        book = ledger(run.kafka, run.name)
        same = all(getattr(book, name) == value for name, value in expected.items())
        return book if same and not book.unread else None

    book = eventually(now, 120, f"a ledger with {expected}")
    assert book is not None
    assert book.balanced, book.problems
    return book


def batched(run: RealRun) -> Counter[str]:
    return Counter(uid for batch in run.read("batches") for uid in batch.uids)  # type: ignore[attr-defined]


def test_a_run_with_open_groups_goes_on_with_other_partitions_and_both_ledgers_close(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=4)
    run.prepare()
    process = run.start("group")
    run.send(rollout(f"x{example}", member) for example in range(40) for member in range(4 if example % 2 else 2))
    eventually(lambda: sum(batched(run).values()) == 80, 120, "whole groups in batches")

    seven = split(run, f"{run.name}-7", 7)
    assert process.wait(60) == 0
    assert seven["moved"] == 40
    again = run.start("group")
    assert again.wait(60) == 2
    assert f"start this with --run {run.name}-7" in run.log_of(again)
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert (old.batched, old.moved, old.in_flight, old.unread) == (80, 40, 0, 0)
    assert verify(run.kafka, run.name).mismatches == []

    wide = successor(run, f"{run.name}-7", 7)
    wide.start("group")
    wide.send(rollout(f"x{example}", member) for example in range(0, 20, 2) for member in (2, 3))
    book = settled(wide, batched=40)
    assert (book.in_flight, book.predecessor["moved"]) == (20, 40)
    assert verify(run.kafka, wide.name).mismatches == []

    two = split(wide, f"{run.name}-2", 2)
    assert two["moved"] == 20
    narrow = successor(run, f"{run.name}-2", 2)
    narrow.start("group", "--ordinal", "1")
    narrow.send(rollout(f"x{example}", member) for example in range(20, 40, 2) for member in (2, 3))
    settled(narrow, batched=40)
    settled(wide, batched=40, moved=20)
    assert verify(run.kafka, narrow.name).mismatches == []
    done = ran(narrow, "ledger", "--with-predecessors", "--json")
    assert done.returncode == 0, done.stdout
    *runs, together = json.loads(done.stdout)["chain"]
    assert [row["run"] for row in runs] == [narrow.name, wide.name, run.name]
    assert (together["batched"], together["dropped"], together["in_flight"], together["moved"]) == (160, 0, 0, 0)
    every = batched(run) + batched(wide) + batched(narrow)
    assert every == Counter(f"x{example}-{member}" for example in range(40) for member in range(4))


@pytest.mark.long
def test_what_was_excluded_or_paused_stays_so_in_the_successor(real_run: RealRun) -> None:
    run = real_run.prepare()
    process = run.start("group")
    run.send(rollout(example, member) for example in ("broken", "sound") for member in range(2))
    settled(run, in_flight=4)
    [message] = [m for m in read_to_end(run.kafka, run.topic("rollouts")) if b"broken-0" in (m.value or b"")]
    done = ran(run, "exclude", "--offsets", f"{message.partition}:{message.offset}")
    assert done.returncode == 0, done.stderr
    steering.write(run.kafka, run.name, steering.PAUSED, {"env": PausedEnvironment(environment="env", reason="hangs")})
    steering.write(run.kafka, run.name, steering.WEIGHT, {"other": MixtureWeight(environment="other", weight=2.0)})
    steering.write(run.kafka, run.name, steering.WEIGHT, {"env": MixtureWeight(environment="env", weight=3.0)})
    steering.write(run.kafka, run.name, steering.WEIGHT, {"env": None})

    answer = split(run, f"{run.name}-3", 3)
    assert process.wait(60) == 0
    three = successor(run, f"{run.name}-3", 3)
    decided = steering.desired_state(run.kafka, three.name)
    assert ({*decided.paused}, decided.weights) == ({"env"}, {"other": 2.0})
    in_force = newest(partition_configurations(run.kafka, three.name, run.grouper))
    assert (in_force.generation, len(in_force.exclude_offsets)) == (2, 1)
    assert load(Path(answer["configuration"])).grouping == in_force

    three.start("group")
    three.send(rollout(example, member) for example in ("broken", "sound") for member in (2, 3))
    settled(three, in_flight=0, batched=4, dropped={"excluded": 4})
    assert batched(three) == Counter(f"sound-{member}" for member in range(4))
    assert verify(run.kafka, three.name).mismatches == []


KILLED = """
import os, signal, sys
from importlib import import_module
module, owner, name, call = {point!r}
place = import_module(f"rollstream.{{module}}")
place = getattr(place, owner) if owner else place
original, calls = getattr(place, name), []

def killing(*arguments, **settings):
    calls.append(name)
    if len(calls) == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **settings)

setattr(place, name, killing)
from rollstream.pipeline.cli import main
sys.exit(main(sys.argv[1:]))
"""
POINTS = [
    ("pipeline.split.closing", "", "close", 1),
    ("pipeline.split.closing", "", "run_grouping", 1),
    ("pipeline.split.moving", "", "create", 1),
    # Within the transaction that writes the first state, and within the one that moves the second partition.
    ("topics.kafka.transactions", "Transaction", "flush", 1),
    ("topics.kafka.transactions", "Transaction", "flush", 3),
    ("pipeline.split.moving", "", "carry_batches", 1),
    ("topics.kafka.transactions", "Transaction", "flush", 1),
    ("pipeline.split.learners", "", "carry_weights", 1),
    ("pipeline.tools.split", "", "write_to_successor", 1),
]
"""Function before which a split is killed: module, class, name and number of the call."""


@pytest.mark.long
def test_a_split_that_is_killed_at_any_point_and_run_again_moves_every_record_once(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=4)
    run.prepare()
    process = run.start("group")
    run.send(rollout(f"x{example}", member) for example in range(32) for member in range(4 if example % 2 else 3))
    eventually(lambda: sum(batched(run).values()) == 64, 120, "whole groups in batches")
    words = ("split", "--into", f"{run.name}-7", "--partitions", "7")
    for point in POINTS:
        killed = run.start(*words, script=KILLED.format(point=point))
        assert killed.wait(300) == -9, run.log_of(killed)
    assert process.wait(60) == 0
    last = run.start(*words)
    assert last.wait(300) == 0, run.log_of(last)

    wide = successor(run, f"{run.name}-7", 7)
    wide.start("group")
    wide.send(rollout(f"x{example}", 3) for example in range(0, 32, 2))
    settled(wide, batched=64)
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert (old.batched, old.moved, old.in_flight, old.unread) == (64, 48, 0, 0)
    assert [*verify(run.kafka, run.name).mismatches, *verify(run.kafka, wide.name).mismatches] == []
    assert batched(run) + batched(wide) == Counter(
        f"x{example}-{member}" for example in range(32) for member in range(4)
    )


OPENED = """
import sys
from rollstream.pipeline.split import closing, moving
from rollstream.pipeline.cli import main
original = moving.copy_decisions

def opening(config, after):
    original(config, after)
    closing.reopen(config)

moving.copy_decisions = opening
sys.exit(main(sys.argv[1:]))
"""
"""A split during which somebody sets the topic back, as an operator of topics on a cluster does."""


@pytest.mark.long
def test_a_split_whose_topic_is_opened_again_is_refused_until_it_stays_closed(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=2)
    run.prepare()
    process = run.start("group")
    run.send(rollout(f"x{example}", member) for example in range(8) for member in range(2))
    eventually(lambda: settled(run, in_flight=16), 120, "open groups")
    words = ("split", "--into", f"{run.name}-3", "--partitions", "3")
    opened = run.start(*words, script=OPENED)
    assert opened.wait(300) == 2, run.log_of(opened)
    assert process.wait(60) == 0
    assert "accepts records again" in run.log_of(opened)
    assert 'strimzi.io/managed: "false"' in run.log_of(opened)
    assert splits_of(run.kafka, run.name).successor.phase == "moving"

    split(run, f"{run.name}-3", 3)
    assert splits_of(run.kafka, run.name).successor.phase == "moved"
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert (old.moved, old.in_flight, old.unread) == (16, 0, 0)


class Producer:
    """Sends members of groups one after another, and to the successor once the broker refuses them."""

    def __init__(self, run: RealRun, wide: RealRun) -> None:
        self.stop = threading.Event()
        self.refused = 0
        self.sent: list[str] = []
        self._run, self._wide = run, wide
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        target, producers = self._run, {r.name: clients.producer(r.kafka) for r in (self._run, self._wide)}
        for number in itertools.count():
            if self.stop.is_set() and number % 4 == 0:
                return
            record = rollout(f"x{number // 4}", number % 4)
            while not self._sent_to(producers[target.name], target, record):
                self.refused += 1
                target = self._wide
            self.sent.append(record.uid)

    def _sent_to(self, producer: Any, target: RealRun, record: Rollout) -> bool:
        errors: list[Any] = []

        def report(error: Any, _message: object) -> None:
            errors.append(error)

        key = encode_key(record.environment, record.example_id)
        producer.produce(target.topic("rollouts"), encode(record), key, on_delivery=report)
        assert producer.flush(120) == 0
        [error] = errors
        return error is None  # Not by ==: a KafkaError that is compared with None leaves an exception behind.

    def end(self) -> None:
        self.stop.set()
        self._thread.join(300)


@pytest.mark.long
def test_producers_that_write_until_they_are_refused_go_on_in_the_successor_and_nothing_is_lost(
    real_run: RealRun,
) -> None:
    run = real_run.prepare()
    wide = successor(run, f"{run.name}-5", 5)
    for ordinal in range(2):
        run.start("group", "--ordinal", str(ordinal))
    # The client waits for topics that do not exist yet.
    producer = Producer(run, wide)
    try:
        eventually(lambda: sum(batched(run).values()) >= 100, 120, "batches under load")
        assert split(run, wide.name, 5)["successor"] == wide.name
        wide.start("group")
        eventually(lambda: sum(batched(wide).values()) >= 100, 120, "batches under load in the successor")
    finally:
        producer.end()
    assert producer.refused >= 1
    book = settled(wide, in_flight=0)
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert (old.dropped, book.dropped, old.in_flight, old.unread) == ({}, {}, 0, 0)
    assert batched(run) + batched(wide) == Counter(producer.sent)
    assert [*verify(run.kafka, run.name).mismatches, *verify(run.kafka, wide.name).mismatches] == []


@pytest.mark.long
def test_a_learner_goes_on_with_the_same_parameters_and_the_batches_it_had_yet_to_read(real_run: RealRun) -> None:
    run = real_run
    run.grouping = replace(run.grouping, batch_rollouts=8)
    provisioning.apply(run.kafka, run.topics, run.name)
    initialise(run.kafka, run.name, run.grouping, run.grouper)
    run.start("group")
    learner = run.start("learn", **SMALL_LEARNER)
    eventually(lambda: '"learner_started"' in run.log_of(learner), 300, "the learner")
    run.send(rollout(f"x{example}", member) for example in range(10) for member in range(4))
    run.send([rollout("open", member) for member in range(2)])
    eventually(lambda: [s for s in steps(run) if s.step == 1], 300, "the first step")
    eventually(lambda: sum(batched(run).values()) == 40, 60, "batches of which one waits")

    answer = split(run, f"{run.name}-3", 3)
    assert learner.wait(120) == 0
    assert answer["batches_carried"] >= 1
    assert answer["policy_version"] == 1
    three = successor(run, f"{run.name}-3", 3)
    three.start("group")
    again = three.start("learn", **SMALL_LEARNER)
    three.send([rollout("open", member) for member in (2, 3)])
    three.send(rollout(f"y{example}", member) for example in range(8) for member in range(4))
    eventually(lambda: [s for s in steps(three) if s.step == 2], 300, "the second step")
    before, after = ({s.step: s for s in steps(r)} for r in (run, three))
    assert before[1].params_digest == after[1].params_digest
    assert '"learner_resumed"' in three.log_of(again)
    assert {use.batch_id for use in after[2].uses}.isdisjoint(use.batch_id for use in before[1].uses)
    assert after[2].policy_version == 2
    book = settled(three, in_flight=0)
    assert book.predecessor["carried"] == answer["batches_carried"]
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems

    carried = after[2].uses[0].batch_id
    report = ran(run, "lineage", "--batch", carried).stdout
    assert f"carried over to run {three.name}" in report
    assert f"step {after[2].learner}/2: " in report
    assert f"of run {run.name}: offsets " in ran(three, "lineage", "--step", "2").stdout
    refused = ran(three, "lineage", "--batch", carried)
    assert (refused.returncode, f"look it up with --run {run.name}" in refused.stderr) == (2, True)


def test_batches_behind_an_open_transaction_are_carried_over_once_it_ends(real_run: RealRun) -> None:
    run = real_run
    run.grouping = replace(run.grouping, batch_rollouts=4)
    run.topics = TopicsConfig(partitions=1)
    run.prepare()
    run.start("group")
    run.send(rollout("before", member) for member in range(4))
    eventually(lambda: len(batched(run)) == 4, 60, "a batch")
    into = f"{run.name}-2"
    with run.open_transaction("batch-index"):
        run.send(rollout("behind", member) for member in range(4))
        eventually(lambda: len(batched(run)) == 8, 60, "a batch whose entry is hidden")
        process = run.start("split", "--into", into, "--partitions", "2")
        waits = f"{run.topic('batch-index')}[0] from offset"
        eventually(lambda: waits in run.log_of(process) or process.poll() is not None, 120, "it waits or ends")
    assert process.wait(120) == 0, run.log_of(process)
    predecessor = splits_of(run.kafka, into).predecessor
    assert predecessor is not None
    assert predecessor.carried == 2


def record(run: RealRun, step: int, position: int = 0, digest: str = "d", **fields: Any) -> None:
    """Write a step of learner `main`."""
    made = LearnerStep(
        learner="main",
        step=step,
        input_run=run.name,
        position=position,
        policy_version=-1,
        params_digest=digest,
        trained_total=0,
        skipped_total=0,
        **{"uses": (), **fields},
    )
    run.send_bytes("steps", encode(made), encode_key("main", step))


def checkpoint(run: RealRun, step: int, **places: int) -> tuple[str, str]:
    """Write the part of a checkpoint that a split reads, and return the flags that name its directory."""
    path = metadata(run, step)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(places))
    return "--set", f"learner.checkpoint.directory={run.directory / 'checkpoints'}"


def metadata(run: RealRun, step: int) -> Path:
    return run.directory / "checkpoints" / run.name / "main" / str(step) / "meta" / "metadata"


@pytest.mark.long
def test_skips_on_record_of_a_step_that_waits_need_no_checkpoint(real_run: RealRun) -> None:
    run, wide = real_run.prepare(), successor(real_run, f"{real_run.name}-3", 3)
    record(run, 1)
    directory = checkpoint(run, 1, position=0)
    record(run, 2, digest="")
    assert split(run, wide.name, 3, *directory)["positions"] == {"main": 0}
    assert json.loads(metadata(wide, 1).read_text())["position"] == 0


@pytest.mark.long
def test_a_rollout_buffer_whose_rollouts_are_not_all_on_record_is_refused_before_anything_ends(
    real_run: RealRun,
) -> None:
    run, wide = real_run.prepare(), successor(real_run, f"{real_run.name}-3", 3)
    process = run.start("group")
    run.send(rollout(f"x{example}", member) for example in range(4) for member in range(4))
    eventually(lambda: sum(batched(run).values()) == 16, 120, "whole groups in batches")
    index = list(read_to_end(run.kafka, run.topic("batch-index")))
    offsets, entries = [message.offset for message in index], list(index_of(run.kafka, run.name).values())
    first, position = offsets[0], offsets[-1] + 1

    def use(number: int, **rows: Any) -> BatchUse:
        entry = entries[number]
        whole = {"rows": entry.rollouts, "use": "trained"}
        return BatchUse(batch_id=entry.batch_id, index_offset=offsets[number], **{**whole, **rows})

    held = entries[0].rollouts - 1
    uses = (use(0, rows=1, row_numbers=(0,)), *(use(number) for number in range(1, len(entries))))
    record(run, 1, position, uses=uses, oldest=first, stream_time_ms=1)
    directory = checkpoint(run, 1, position=position, oldest=first)
    refused = ran(run, "split", "--into", wide.name, "--partitions", "3", *directory)
    assert refused.returncode == 2
    assert f"the rollout buffer of learner main of run {run.name} holds {held} rollouts" in refused.stderr
    assert splits_of(run.kafka, run.name).successor is None
    assert process.poll() is None

    # The other rows are skipped; a row that was trained on stays in the buffer to be drawn again.
    rest = use(0, rows=held, row_numbers=tuple(range(1, held + 1)), use="skipped", reason="r")
    record(run, 2, position, uses=(rest,), oldest=first, stream_time_ms=1)
    checkpoint(run, 2, position=position, oldest=first)
    answer = split(run, wide.name, 3, *directory)
    assert answer["batches_carried"] == 0
    carried = json.loads(metadata(wide, 2).read_text())
    assert carried["oldest"] == carried["position"] == answer["positions"]["main"]


def steps(run: RealRun) -> list[LearnerStep]:
    return [step for step in run.read("steps") if isinstance(step, LearnerStep)]


def test_lineage_names_where_a_moved_rollout_came_from_and_where_it_went(real_run: RealRun) -> None:
    run = real_run.prepare()
    run.send([rollout("open", member) for member in range(2)])
    split(run, f"{run.name}-3", 3)
    three = successor(run, f"{run.name}-3", 3)
    [copy] = [m for m in read_to_end(run.kafka, three.topic("rollouts")) if b"open-0" in (m.value or b"")]
    source = moved_from(copy)
    assert source is not None
    place, origin = f"{copy.partition}:{copy.offset}", f"{source[1]}:{source[2]}"
    assert f"run {run.name}, {origin}" in ran(three, "lineage", "--offset", place).stdout
    report = ran(run, "lineage", "--offset", origin).stdout
    assert f"run {three.name}" in report
    assert place in report
    [original] = [m for m in read_to_end(run.kafka, run.topic("rollouts")) if b"open-0" in (m.value or b"")]
    assert (original.key, original.value) == (copy.key, copy.value)
    done = ran(run, "topics", "apply")
    assert done.returncode != 0
    assert "was split" in done.stderr


@pytest.mark.long
def test_what_is_excluded_from_a_successor_is_left_out_of_the_batches_that_it_carried_over(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=1)
    run.grouping = replace(run.grouping, batch_rollouts=4)
    run.prepare()
    process = run.start("group")
    broken = RolloutMetadata(worker_id="broken", timestamp=1.0)
    run.send(rollout("good", member) for member in range(4))
    run.send(rollout("half", member, metadata=broken) for member in range(4))
    run.send(rollout("bad", member, environment="bad") for member in range(4))
    run.send(rollout("open", member, environment="bad") for member in range(2))
    eventually(lambda: sum(batched(run).values()) == 12, 120, "whole groups in batches")
    carried = [batch.batch_id for batch in run.read("batches")]  # type: ignore[attr-defined]
    assert split(run, f"{run.name}-2", 2)["batches_carried"] == 3
    assert process.wait(60) == 0
    two = successor(run, f"{run.name}-2", 2)
    two.start("group")

    def named(*words: str) -> list[tuple[str, int]]:
        done = ran(two, "exclude", *words, "--json")
        assert done.returncode == 0, done.stderr
        return [(batch["batch_id"], batch["excluded"]) for batch in json.loads(done.stdout)["batches"]]

    assert named("--offsets", "0:0-11") == [], "offsets name rollouts of the successor"
    assert named("--worker", "broken") == [(carried[1], 4)]
    assert named("--env", "bad") == [(carried[2], 4)]
    left_out = [record.batch_id for record in two.read("control") if isinstance(record, ExcludedBatch)]
    assert sorted(left_out) == sorted(carried[1:])


def test_a_run_whose_records_wait_for_labels_is_refused_and_stays_open(real_run: RealRun) -> None:
    run = real_run.prepare()
    run.send_bytes("unlabelled", encode(rollout("waits")), encode_key("env", "waits"))
    done = ran(run, "split", "--into", f"{run.name}-3", "--partitions", "3")
    assert done.returncode != 0
    assert "1 records" in done.stderr
    assert "wait for labels" in done.stderr
    run.send([rollout("open")])
    assert splits_of(run.kafka, run.name).successor is None


@pytest.mark.long
def test_labeling_of_a_successor_begins_at_offset_0_though_copies_were_labeled_before(real_run: RealRun) -> None:
    run, wide = real_run.prepare(), f"{real_run.name}-3"
    producer = clients.producer(run.kafka)
    value, key = encode(rollout("open")), encode_key("env", "open")
    producer.produce(run.topic("rollouts"), value, key, headers={SOURCE: "1:5000"})
    assert producer.flush(120) == 0
    assert split(run, wide, 3)["moved"] == 1
    config, beginning = LabelingConfig(), {0: 0, 1: 0, 2: 0}
    ensure_positions(run.kafka, wide, config.group_id(wide))
    committed = committed_offsets(run.kafka, config.group_id(wide), f"{wide}.unlabelled", 3)
    assert {place.partition: place.offset for place in committed} == beginning
    assert recover(run.kafka, wide, config) == beginning
