"""Large arrays of rollouts in a store: exactly once and bit for bit on the way to trainers, archives and other runs."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.batch_reader import BatchReader, ReadBatch
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.pipeline.audit.verification import verify
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import ArraysConfig
from rollstream.topics.errors import RecordTooLarge
from rollstream.topics.files import stored_arrays
from rollstream.topics.files.stored_arrays import LargeArrays, StoredArrays
from rollstream.topics.files.stores import LocalStore
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import NamedArray, Rollout
from rollstream.topics.records.fates import MISSING_ARRAY
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

EXPERTS = "routed_experts"
LIMIT = 1_048_588
"""Largest record, in bytes: the default of brokers (message.max.bytes)."""


def with_store(run: RealRun) -> RealRun:
    """A run whose records are small, and whose large arrays lie beside it."""
    run.kafka = replace(run.kafka, max_record_bytes=LIMIT, arrays=ArraysConfig(url=str(run.directory / "store")))
    run.grouping = GroupingConfig(batch_rollouts=4, batch_bytes=500_000, max_batch_age_s=0.5, token_arrays=(EXPERTS,))
    return run.prepare()


def settings_of(run: RealRun) -> dict[str, Any]:
    chunk = {"learner__weights__chunk_bytes": LIMIT // 2}
    return {"kafka__arrays__url": run.kafka.arrays.url, "kafka__max_record_bytes": LIMIT, **chunk}


def arrays_of(run: RealRun) -> StoredArrays:
    return StoredArrays.of(run.name, run.kafka.arrays)


def large(example: str, member: int, width: int = 4096) -> Rollout:
    """A rollout with experts of 384 bytes for each unit of width: 1.6 MB, above the limit of a record."""
    made = rollout(example, member)
    seed = [*example.encode(), member]
    experts = np.random.default_rng(seed).integers(0, 128, (len(made.tokens), 64, width), dtype="|u1")
    return replace(made, token_arrays={EXPERTS: NamedArray.of(experts)})


def group(run: RealRun, *examples: str) -> list[Rollout]:
    """Send groups and let them be batched; return their rollouts."""
    process = run.start("group", **settings_of(run))
    rollouts = [large(example, member) for example in examples for member in range(4)]
    with RolloutProducer(run.kafka, run.name) as producer:
        for one in rollouts:
            producer.send(one)
    settled(run, batched=len(rollouts), in_flight=0)
    process.terminate()
    assert process.wait(300) == 0
    return rollouts


def reads(run: RealRun, count: int, *arrays: str) -> list[ReadBatch]:
    with BatchReader(run.kafka, run.name, arrays=arrays, wait_s=5) as reader:
        batches = [reader.poll(60) for _ in range(count)]
    return [read for read in batches if read is not None]


def told(run: RealRun, *words: str) -> str:
    return run.told(*words, **settings_of(run))


def letters(run: RealRun) -> list[dict[str, str]]:
    return [
        {name: (value or b"").decode() for name, value in message.header_pairs()}
        for message in read_to_end(run.kafka, run.topic("dead-letters"))
    ]


def test_rollouts_above_the_limit_of_a_record_reach_trainers_bit_for_bit(real_run: RealRun) -> None:
    run = with_store(real_run)
    plain = replace(run.kafka, arrays=ArraysConfig())
    with (
        RolloutProducer(plain, run.name) as producer,
        pytest.raises(RecordTooLarge, match=r"set kafka\.arrays\.url for large token_arrays"),
    ):
        producer.send(large("x", 0))
    rollouts = group(run, "x", "y")
    sent = {one.uid: one.token_arrays[EXPERTS] for one in rollouts}
    assert len(arrays_of(run).sizes()) == len(sent) == 8

    lazy = [example for read in reads(run, 2) for example in read.examples()]
    assert all(not example.token_arrays for example in lazy)
    assert {e.source.uid: arrays_of(run).load(e.stored_arrays[EXPERTS]) for e in lazy} == sent
    fetched = [example for read in reads(run, 2, EXPERTS) for example in read.examples()]
    assert {e.source.uid: NamedArray.of(e.token_arrays[EXPERTS]) for e in fetched} == sent
    assert letters(run) == []

    # The fold reads no object, so what is in the log can be proved without the store.
    shutil.rmtree(run.kafka.arrays.url)
    proof = verify(run.kafka, run.name)
    assert (proof.batches, proof.mismatches) == (2, [])


def test_an_array_whose_rollout_was_never_sent_is_no_rollout_and_is_pruned(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_store(real_run)
    monkeypatch.setattr(stored_arrays, "day_name", lambda _time_s: "20200101")
    # As if killed between the object and the record: one group lacks a member, which is then sent again.
    lost = LargeArrays(run.name, run.kafka.arrays).stored(large("x", 0), 1.0).token_arrays[EXPERTS].stored
    LargeArrays(run.name, run.kafka.arrays).stored(large("gone", 0), 1.0)
    assert len(arrays_of(run).sizes()) == 2
    group(run, "x")
    kept = arrays_of(run).sizes()
    assert lost in kept
    assert len(kept) == 5
    plan = json.loads(told(run, "prune", "--dry-run", "--json"))["stored_arrays"]
    assert (plan["files"], plan["removable"]) == (5, 1)
    assert len(arrays_of(run).sizes()) == 5
    assert "1 of 5 stored arrays" in told(run, "prune", "--yes")
    assert lost in arrays_of(run).sizes()
    assert len(arrays_of(run).sizes()) == 4
    [read] = reads(run, 1, EXPERTS)
    assert (len(read.examples()), letters(run)) == (4, [])


def test_arrays_live_as_long_as_a_record_that_names_them(real_run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_store(real_run)
    monkeypatch.setattr(stored_arrays, "day_name", lambda _time_s: "20200101")
    group(run, "x", "y")
    young = arrays_of(run)
    monkeypatch.undo()
    young.put(NamedArray.of(np.arange(5)))
    first, second = reads(run, 2)
    rollouts = (run.topic("rollouts"), first.entry.partition)
    below = {
        (run.topic("batches"), first.entry.partition): first.entry.offset + 1,
        rollouts: int(first.batch.source_offsets.max()) + 1,
    }
    names = [{entry.array.stored for entry in read.batch.token_arrays} for read in (first, second)]
    told(run, "prune", "--yes")
    assert {*names[0], *names[1]} <= set(arrays_of(run).sizes())
    topic_admin.delete_records(run.kafka, {rollouts: below[rollouts]})
    told(run, "prune", "--yes")
    assert {*names[0], *names[1]} <= set(arrays_of(run).sizes()), "the batches name them"
    topic_admin.delete_records(run.kafka, below)
    told(run, "prune", "--yes")
    left = set(arrays_of(run).sizes())
    assert {name for name in left if name.startswith("2020")} == names[1]
    assert len(left - names[1]) == 1, "an array of today may still be named"


def test_a_missing_or_damaged_array_is_a_dead_letter_and_a_skipped_row_on_record(real_run: RealRun) -> None:
    run = with_store(real_run)
    group(run, "x")
    [intact] = reads(run, 1)
    missing, damaged, *_whole = [e.stored_arrays[EXPERTS].stored for e in intact.examples()]
    folder = Path(run.kafka.arrays.url) / run.name / "arrays"
    (folder / missing).unlink()
    (folder / damaged).write_bytes(b"damaged")
    [read] = reads(run, 1, EXPERTS)
    assert sorted(read.missing) == [0, 1]
    assert [e.source.uid for e in read.examples()] == list(intact.batch.uids[2:])

    first, second = letters(run)
    place = {name: first[f"__streams.errors.{name}"] for name in ("topic", "partition", "offset")}
    assert place == {
        "topic": run.topic("batches"),
        "partition": str(read.entry.partition),
        "offset": str(read.entry.offset),
    }
    source = f"rollouts[{read.entry.partition}] offset {intact.batch.source_offsets[0]}"
    assert f"array {EXPERTS} of row 0, {source}" in first["__streams.errors.message"]
    assert f"{missing} is missing" in first["__streams.errors.message"]
    assert f"{damaged} is damaged" in second["__streams.errors.message"]
    listed = told(run, "dlq", "ls")
    assert "of batches" in listed
    again = run.said("dlq", "redrive", **settings_of(run))
    assert "put the object back into kafka.arrays.url" in again.stderr

    with StepWriter(run.kafka, run.name, learner="test", config=WeightsConfig(chunk_bytes=LIMIT // 2)) as writer:
        step = writer.record([read], publish=False, digest="ab" * 32)
    assert (step.trained_total, step.skipped_total) == (2, 2)
    assert [(use.code, use.row_numbers) for use in step.uses] == [
        ("", (2, 3)),
        (MISSING_ARRAY, (0,)),
        (MISSING_ARRAY, (1,)),
    ]
    eventually(lambda: run.read("steps") == [step], 60, "the step on record")
    assert settled(run, batched=4, in_flight=0).problems == []


def test_an_archive_takes_the_arrays_along_and_a_restored_run_has_them(real_run: RealRun) -> None:
    run = with_store(real_run)
    sent = {one.uid: one.token_arrays[EXPERTS] for one in group(run, "x")}
    archive = str(run.directory / "archive")
    told(run, "archive", archive)
    told(run, "archive", archive)
    assert json.loads(told(run, "archive", archive, "--check", "--json"))["arrays"] == 4
    shutil.rmtree(run.kafka.arrays.url)

    other = run.beside("again")
    other.kafka, other.grouping = run.kafka, run.grouping
    told(run, "restore", archive, "--into", other.name)
    fetched = [example for read in reads(other, 1, EXPERTS) for example in read.examples()]
    assert {e.source.uid: NamedArray.of(e.token_arrays[EXPERTS]) for e in fetched} == sent

    copies = StoredArrays(LocalStore(Path(archive)), f"run={run.name}/_arrays")
    copies.delete([next(iter(copies.sizes()))])
    checked = run.said("archive", archive, "--check", **settings_of(run))
    assert checked.returncode != 0
    assert "an archived record names an array, but" in checked.stderr


def test_a_replay_into_another_run_has_the_arrays_of_its_batches(real_run: RealRun) -> None:
    run = with_store(real_run)
    sent = {one.uid: one.token_arrays[EXPERTS] for one in group(run, "x", "y")}
    other = run.beside("other")
    other.kafka = run.kafka
    told(run, "replay", "--into", other.name)
    fetched = [example for read in reads(other, 2, EXPERTS) for example in read.examples()]
    assert {e.source.uid: NamedArray.of(e.token_arrays[EXPERTS]) for e in fetched} == sent


def test_show_names_the_object_and_fetches_it_only_if_asked(real_run: RealRun) -> None:
    run = with_store(real_run)
    one, *_others = group(run, "x")
    name = arrays_of(run).put(one.token_arrays[EXPERTS]).stored
    assert f"array {EXPERTS}: |u1 " in told(run, "show", one.uid)
    assert f"object {name}" in told(run, "show", one.uid)
    brief = json.loads(told(run, "show", one.uid, "--json"))[0]["rollout"]["token_arrays"][EXPERTS]
    full = json.loads(told(run, "show", one.uid, "--json", "--full"))[0]["rollout"]["token_arrays"][EXPERTS]
    assert (brief["stored"], brief["data"]["bytes"]) == (name, 0)
    assert bytes.fromhex(full["data"]["hex"]) == one.token_arrays[EXPERTS].data


@pytest.mark.long
@pytest.mark.kafka
def test_rollouts_of_six_megabytes_are_batched_once_though_their_producer_is_killed(real_run: RealRun) -> None:
    run = with_store(real_run)
    process = run.start("group", **settings_of(run))
    rollouts = [large(example, member, 16384) for example in "abcd" for member in range(4)]
    sent = random.Random(7).randrange(3, 12)
    forked = os.fork()
    if forked == 0:
        with RolloutProducer(run.kafka, run.name) as producer:
            for number, one in enumerate(rollouts):
                producer.send(one)
                if number < sent:
                    producer.flush()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(forked, 0)[1]) == signal.SIGKILL
    with RolloutProducer(run.kafka, run.name) as producer:
        for one in rollouts:
            producer.send(one)
    book = settled(run, batched=16, in_flight=0)
    assert book.problems == []
    assert sent <= sum(book.dropped.values()) <= sent + 1, "what was on the log when the producer was killed"
    process.terminate()
    assert process.wait(300) == 0
    fetched = [example for read in reads(run, 4, EXPERTS) for example in read.examples()]
    arrays = {example.source.uid: NamedArray.of(example.token_arrays[EXPERTS]) for example in fetched}
    assert arrays == {one.uid: one.token_arrays[EXPERTS] for one in rollouts}
    assert len(arrays_of(run).sizes()) == 16
