"""Lineage of batches that were lost, on topics in memory."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollstream.pipeline.audit import topic_reading
from rollstream.pipeline.tools import run_view
from rollstream.pipeline.tools.lineage import lineage_trees
from rollstream.pipeline.tools.run_view import RunView
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep, PolicyManifest
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

    for module in (run_view, topic_reading):
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


def drawn(run: str, **subject: Any) -> str:
    nothing = dict.fromkeys(("rollout", "offset", "batch", "step", "policy"))
    [tree] = lineage_trees(RunView(KafkaConfig(), run), Namespace(**{**nothing, **subject}))
    return "\n".join(tree.lines())


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
