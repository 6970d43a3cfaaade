"""The entries of the four trees of a statement: rollouts, batches, steps and versions, each as canonical JSON.

Any program that has the records can compute the same entries.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

from blake3 import blake3

from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import BatchUse, LearnerStep, PolicyManifest, TrainingBatch

TreeName = Literal["rollouts", "batches", "steps", "versions"]
TREES: tuple[TreeName, ...] = get_args(TreeName)
Leaf = dict[str, Any]


def canonical(value: Any) -> bytes:
    """Encode plain values as JSON in the one form that is hashed and signed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(data: bytes | None) -> str:
    """Return the BLAKE3 digest of some bytes, in hexadecimal; None counts as no bytes."""
    return blake3(data or b"").hexdigest()


def rollout_leaf(message: KafkaRecord, uid: str, fate: str, batch: str, row: int) -> Leaf:
    """Return the entry of a record of `rollouts`.

    `uid` is empty if the record is not a rollout, and `batch` is empty if no batch has it.
    """
    return {
        "partition": message.partition,
        "offset": message.offset,
        "time_ms": message.timestamp_ms,
        "key": digest_of(message.key),
        "value": digest_of(message.value),
        "uid": uid,
        "fate": fate,
        "batch": batch,
        "row": row,
    }


def batch_leaf(batch: TrainingBatch, digest: str, index_offset: int) -> Leaf:
    """Return the entry of a batch."""
    return {"batch": batch.batch_id, "rows": len(batch), "digest": digest, "index_offset": index_offset}


def step_leaf(step: LearnerStep) -> Leaf:
    """Return the entry of a step."""
    return {
        "learner": step.learner,
        "step": step.step,
        "position": step.position,
        "policy_version": step.policy_version,
        "params_digest": step.params_digest,
        "uses": [_use(use) for use in step.uses],
    }


def _use(use: BatchUse) -> Leaf:
    rows = list(use.row_numbers)
    return {"batch": use.batch_id, "rows": use.rows, "row_numbers": rows, "use": use.use, "again": use.again}


def version_leaf(manifest: PolicyManifest) -> Leaf:
    """Return the entry of a policy version."""
    return {
        "version": manifest.version,
        "learner": manifest.learner,
        "step": manifest.step,
        "digest": manifest.digest,
        "params_digest": manifest.params_digest,
        "model": digest_of(manifest.model.encode()),
    }


def uses_of_row(step: Leaf, batch: str, row: int) -> Iterator[Leaf]:
    """Yield the uses, in the entry of a step, that include a row of a batch."""
    for use in step["uses"]:
        if use["batch"] == batch and (row in use["row_numbers"] if use["row_numbers"] else row < use["rows"]):
            yield use
