"""Lineage of batches across a split of the run, and of batches that were lost, on topics in memory."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollstream.pipeline.audit import topic_reading
from rollstream.pipeline.tools import run_view
from rollstream.pipeline.tools.lineage import LineageNode, lineage_trees
from rollstream.pipeline.tools.run_view import RunView, StepUse
from rollstream.topics import run_splits
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep, PolicyManifest, RunSplit
from rollstream.topics.run_splits import SUCCESSOR_KEY
from tests.support.batches import random_batch

Log = dict[str, list[KafkaRecord]]
TOPICS = ("rollouts", "batches", "batch-index", "journal", "steps", "policies", "control")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The records of each topic; a test adds to them."""
    records: Log = {}

    def read(_kafka: KafkaConfig, topic: str, **_reading: Any) -> Iterator[KafkaRecord]:
        if topic not in records:
            raise TopicError(f"there is no topic {topic}")
        return iter(records[topic])

    def record(view: RunView, name: str, partition: int, offset: int) -> KafkaRecord:
        for message in read(view.kafka, view.topic(name)):
            if (message.partition, message.offset) == (partition, offset):
                return message
        raise TopicError(f"{name}[{partition}] holds no record at offset {offset}")

    for module in (run_view, topic_reading, run_splits):
        monkeypatch.setattr(module, "read_to_end", read)
    monkeypatch.setattr(RunView, "record", record)
    monkeypatch.setattr(topic_admin, "partitions_of", lambda *_: 1)
    monkeypatch.setattr(clients, "check_broker", lambda _kafka: None)
    return records


def create(log: Log, *runs: str) -> None:
    log.update({f"{run}.{name}": [] for run in runs for name in TOPICS})


def append(log: Log, topic: str, record: object, key: bytes | None = None) -> int:
    """Append a record to partition 0 of a topic; return its offset."""
    offset = len(log[topic])
    log[topic].append(KafkaRecord(topic, 0, offset, 1000, key, encode(record)))
    return offset


def put_batch(log: Log, run: str, number: int) -> BatchIndexEntry:
    """Write a batch and its index entry; return the entry."""
    batch = random_batch(number, rows=4)
    entry = BatchIndexEntry.of(batch, append(log, f"{run}.batches", batch))
    append(log, f"{run}.batch-index", entry)
    return entry


def put_step(log: Log, run: str, number: int, *batch_ids: str) -> None:
    uses = tuple(BatchUse(batch_id=name, index_offset=0, rows=4, use="trained") for name in batch_ids)
    step = LearnerStep(
        learner="main", step=number, input_run=run, uses=uses, position=1, policy_version=-1, params_digest="",
        trained_total=4, skipped_total=0,
    )  # fmt: skip
    append(log, f"{run}.steps", step)


def put_split(log: Log, run: str, successor: str, carried_from: int, *entries: BatchIndexEntry) -> None:
    """Record a split, and the entries that it carried over, which name batches of run `main`."""
    for entry in entries:
        append(log, f"{successor}.batch-index", replace(entry, run="main"))
    split = RunSplit(run=run, successor=successor, partitions=2, phase="moved", carried_from=carried_from, carried_at=0)
    append(log, f"{run}.control", split, SUCCESSOR_KEY)


def trees(run: str, **subject: Any) -> list[LineageNode]:
    nothing = dict.fromkeys(("rollout", "offset", "batch", "step", "policy"))
    return lineage_trees(RunView(KafkaConfig(), run), Namespace(**{**nothing, **subject}))


def drawn(run: str, **subject: Any) -> str:
    [tree] = trees(run, **subject)
    return "\n".join(tree.lines())


@pytest.fixture
def split_twice(log: Log) -> Log:
    """Batch 0-0 was trained on before the first split, 0-1 between both, and 0-2 after the second."""
    create(log, "main", "wide", "narrow")
    _first, second, third = (put_batch(log, "main", number) for number in range(3))
    put_step(log, "main", 1, "0-0")
    put_split(log, "main", "wide", 1, second, third)
    put_step(log, "wide", 2, "0-1")
    put_split(log, "wide", "narrow", 1, third)
    put_step(log, "narrow", 3, "0-2")
    return log


@pytest.mark.usefixtures("split_twice")
def test_the_steps_that_trained_on_a_batch_are_found_across_splits() -> None:
    before, between, after = (drawn("main", batch=f"0-{number}") for number in range(3))
    assert "step main/1: trained yes" in before
    assert "carried over" not in before
    assert "carried over to run wide\n" in between
    assert "step main/2: trained yes" in between
    assert "narrow" not in between
    assert after.index("carried over to run wide") < after.index("carried over to run narrow")
    assert after.index("carried over to run narrow") < after.index("step main/3: trained yes")
    assert not any("none yet" in text for text in (before, between, after))


@pytest.mark.usefixtures("split_twice")
def test_a_step_of_a_successor_names_the_offsets_of_a_batch_in_the_run_that_holds_it() -> None:
    assert "cut from rollouts[0] of run main: offsets 4-7" in drawn("wide", step=2)
    assert "cut from rollouts[0] of run main: offsets 8-11" in drawn("narrow", step=3)


@pytest.mark.usefixtures("split_twice")
def test_a_batch_that_was_carried_over_is_refused_with_the_run_that_holds_it() -> None:
    with pytest.raises(TopicError, match="batch 0-2 was carried over from run main; look it up with --run main"):
        trees("narrow", batch="0-2")
    with pytest.raises(TopicError, match="run narrow has no batch 0-0"):
        trees("narrow", batch="0-0")


@pytest.mark.parametrize("fault", [TopicError("there is no topic"), AccessDenied("no right")])
@pytest.mark.usefixtures("split_twice")
def test_a_run_that_was_deleted_or_may_not_be_read_hides_only_its_own_part(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses_of, record = RunView.uses_of, RunView.record

    def uses(view: RunView, batch_id: str) -> list[StepUse]:
        if view.run == "narrow":
            raise fault
        return uses_of(view, batch_id)

    def lost(view: RunView, name: str, partition: int, offset: int) -> KafkaRecord:
        if (view.run, name) == ("main", "batches"):
            raise fault
        return record(view, name, partition, offset)

    monkeypatch.setattr(RunView, "uses_of", uses)
    assert f"carried over to run narrow: its steps cannot be read: {fault}" in drawn("main", batch="0-2")
    monkeypatch.setattr(RunView, "record", lost)
    assert f"cut from run main: its batch cannot be read: {fault}" in drawn("wide", step=2)


def test_a_batch_that_the_log_does_not_hold_where_the_index_says_is_named_and_not_counted(log: Log) -> None:
    create(log, "main")
    entry = put_batch(log, "main", 0)
    append(log, "main.batch-index", replace(entry, batch_id="0-901"))
    append(log, "main.batch-index", replace(entry, batch_id="0-902", offset=7))
    put_step(log, "main", 1, "0-0", "0-901", "0-902")
    manifest = PolicyManifest(version=0, learner="main", step=0, epoch="", tensors=(), chunks=(), digest="")
    append(log, "main.policies", manifest)
    sampled = drawn("main", policy=0)
    assert "batched rollouts 4: sampled by it in batches 0-0 (4)" in sampled
    assert "not counted a batch that the log does not hold where the index says: batches 0-901 0-902" in sampled
    step = drawn("main", step=1)
    assert step.count("cut from rollouts[0]: offsets 0-3") == 1
    assert step.count("cut from a batch that the log does not hold where the index says") == 2
