"""Lineage of batches that were lost, on topics in memory."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from rollstream.pipeline.index.indexed_run import IndexedRun
from rollstream.pipeline.tools.lineage import lineage_trees
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep, PolicyManifest
from rollstream.topics.wire.codec import encode
from tests.support.batches import random_batch
from tests.support.index_logs import ListedLog, indexed

Log = list[tuple[str, KafkaRecord]]


def append(log: Log, name: str, record: object) -> int:
    """Append a record to partition 0 of a topic; return its offset."""
    offset = sum(of == name for of, _record in log)
    log.append((name, KafkaRecord(f"main.{name}", 0, offset, 1000, None, encode(record))))
    return offset


def put_batch(log: Log, number: int) -> BatchIndexEntry:
    """Write a batch and its index entry; return the entry."""
    batch = random_batch(number, rows=4)
    entry = BatchIndexEntry.of(batch, append(log, "batches", batch))
    append(log, "batch-index", entry)
    return entry


def put_step(log: Log, number: int, *batch_ids: str) -> None:
    uses = tuple(BatchUse(batch_id=name, index_offset=0, rows=4, use="trained") for name in batch_ids)
    step = LearnerStep(
        learner="main", step=number, input_run="main", uses=uses, position=1, policy_version=-1, params_digest="",
        trained_total=4, skipped_total=0,
    )  # fmt: skip
    append(log, "steps", step)


def test_a_batch_that_the_log_does_not_hold_where_the_index_says_is_named_and_not_counted(tmp_path: Path) -> None:
    log: Log = [("rollouts", KafkaRecord("main.rollouts", 0, 0, 0, None, b""))]
    entry = put_batch(log, 0)
    append(log, "batch-index", replace(entry, batch_id="0-901"))
    append(log, "batch-index", replace(entry, batch_id="0-902", offset=7))
    put_step(log, 1, "0-0", "0-901", "0-902")
    manifest = PolicyManifest(version=0, learner="main", step=0, epoch="", tensors=(), chunks=(), digest="")
    append(log, "policies", manifest)
    with indexed(tmp_path, ListedLog(log, run="main")) as run:
        sampled = drawn(run, policy=0)
        assert "batched rollouts 4: sampled by it in batches 0-0 (4)" in sampled
        assert "not counted a batch that the log does not hold where the index says: batches 0-901 0-902" in sampled
        step = drawn(run, step=1)
        assert step.count("cut from rollouts[0]: offsets 0-3") == 1
        assert step.count("cut from a batch that the log does not hold where the index says") == 2


def drawn(run: IndexedRun, **subject: int) -> str:
    nothing = dict.fromkeys(("rollout", "offset", "batch", "step", "policy"))
    [tree] = lineage_trees(run, Namespace(**{**nothing, **subject}))
    return "\n".join(tree.lines())
