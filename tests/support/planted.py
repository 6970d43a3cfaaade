"""A small run with planted facts: what tools report, each fact once, and nothing else out of the ordinary.

Made by a real grouping process on a real broker; the learner's steps are written by hand, as no model is needed.
"""

import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.models.tokenizer_log import put_tokenizer
from rollstream.pipeline.audit.ledger import Ledger
from rollstream.pipeline.command_line.plain_values import decoded
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import (
    BatchUse,
    GroupCancelled,
    LearnerStep,
    Mark,
    NamedArray,
    PolicyManifest,
    SamplingParams,
    TrainingBatch,
)
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS, SAMPLING_MASK, SAMPLING_MASK_COUNTS
from tests.support.batches import indexed_batches
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

POISON = b"\xc3\x01 not a record"
GOOD = tuple(f"good{n}" for n in range(8))


@dataclass
class Planted:
    """The run, and the facts of it."""

    run: RealRun
    batches: list[TrainingBatch] = field(default_factory=list)
    """In index order; the learner's only step used the first and skipped the second."""
    index_offsets: list[int] = field(default_factory=list)
    """Index offsets of these batches."""
    twice: str = "twice-0"
    """A uid sent twice within its open group."""
    cancelled: str = "cancelled-3"
    """A member that never came, its group batched without it."""
    slow: tuple[str, ...] = ("slow-0", "slow-1")
    """Half a group whose deadline passed."""
    stale: tuple[str, ...] = tuple(f"stale-{n}" for n in range(4))
    """A group complete when its version was too old."""

    def batch_of(self, uid: str) -> TrainingBatch:
        return next(batch for batch in self.batches if uid in batch.uids)


def plant(run: RealRun) -> Planted:
    """Make the run, wait until everything is in its place, and end its processes."""
    run.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=0.5, group_deadline_s=1.0, max_policy_lag=1)
    run.prepare()
    put_tokenizer(run.kafka, run.name, "")
    process = run.start("group", kafka__compression="none")
    planted = Planted(run)
    run.send(rollout(name, member) for name in GOOD[1:] for member in range(4))
    run.send(rollout(GOOD[0], member, **(_replayed(member) if member % 2 else {})) for member in range(4))
    run.send(rollout("twice", member) for member in (0, 1, 0, 2, 3))
    run.send(rollout("cancelled", member) for member in range(3))
    cancelled = GroupCancelled(
        environment="env", example_id="cancelled", policy_version=0, group_size=4, uids=(planted.cancelled,)
    )
    run.send_bytes("rollouts", encode(cancelled), encode_key("env", "cancelled"))
    run.send_bytes("rollouts", POISON, encode_key("env", "good0"))
    run.send(rollout("slow", member) for member in range(2))
    settled(run, in_flight=0, dropped={"duplicate_uid": 1, "group_too_small": 2})
    # The mark of version 5 ends the batch of a replay that keeps the slow group.
    old_s = time.monotonic() + run.grouping.max_batch_age_s
    eventually(lambda: time.monotonic() > old_s, 60, "the age of a batch")
    run.publish_version(5)
    eventually(lambda: len(_marks_of(run, 5)) == run.topics.partitions, 60, "marks of policy version 5")
    run.send(rollout("stale", member) for member in range(4))
    settled(run, in_flight=0, dropped={"duplicate_uid": 1, "group_too_small": 2, "stale_version": 4})
    end(process)
    for read in indexed_batches(run.kafka, run.name):
        planted.batches.append(read.batch)
        planted.index_offsets.append(read.index_offset)
    _train(planted)
    return planted


def _replayed(member: int) -> dict[str, Any]:
    """Fields of a rollout of 3 tokens and 3 sampled ones with arrays that a learner replays."""
    experts = np.arange(6 * 2 * 2, dtype="|u1").reshape(6, 2, 2) + np.uint8(member)
    experts[-1] = 255
    counts = np.array([0, 0, 0, 2, 1, 3], "<i4")
    arrays = {
        ROUTED_EXPERTS: experts,
        SAMPLING_MASK: np.arange(counts.sum(), dtype="<i4"),
        SAMPLING_MASK_COUNTS: counts,
    }
    return {
        "sampling": SamplingParams(top_p=0.9),
        "token_arrays": {name: NamedArray.of(array) for name, array in arrays.items()},
    }


def _marks_of(run: RealRun, version: int) -> list[Mark]:
    values = (decoded(message.value) for message in read_to_end(run.kafka, run.topic("rollouts")))
    return [mark for mark in values if isinstance(mark, Mark) and mark.policy_version == version]


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(300) == 0


def _train(planted: Planted) -> None:
    """Write a step that trained on the first batch and skipped the second, and publish version 6 after it."""
    first, second = planted.batches[:2]
    places = planted.index_offsets[:2]
    step = LearnerStep(
        learner="main",
        step=1,
        input_run=planted.run.name,
        uses=(
            BatchUse(batch_id=first.batch_id, index_offset=places[0], rows=len(first), use="trained"),
            BatchUse(
                batch_id=second.batch_id,
                index_offset=places[1],
                rows=len(second),
                use="skipped",
                reason="stale",
                code="stale_version",
            ),
        ),
        position=places[1] + 1,
        policy_version=6,
        params_digest="ab" * 32,
        trained_total=len(first),
        skipped_total=len(second),
    )
    planted.run.send_bytes("steps", encode(step), encode_key("main", 1))
    manifest = PolicyManifest(version=6, learner="main", step=1, epoch="e", tensors=(), chunks=(), digest="cd" * 32)
    planted.run.send_bytes("policies", encode(manifest), encode_key(6))


def check(book: Ledger) -> None:
    """The run's ledger must name the planted facts and nothing else."""
    assert book.balanced, book.problems
    assert book.dropped == {"duplicate_uid": 1, "group_too_small": 2, "stale_version": 4}
    assert book.dead_lettered == 1
    assert book.batched == 4 * len(GOOD) + 4 + 3
