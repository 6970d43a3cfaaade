"""RLExample: one training example as trainers take it, and how a TrainingBatch is read as a list of them.

The same dataclass leaves a batch maker and enters a learner; it carries where it came from.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from topics.records import Bool, Float32, Int32, Int64, TrainingBatch

REFERENCE = "reference_log_probs"
"""Name under which a rollout carries log-probabilities by a reference model in token_arrays."""


class Source(NamedTuple):
    """Where an example lies in `rollouts`."""

    partition: int
    offset: int
    uid: str


@dataclass(frozen=True, kw_only=True)
class RLExample:
    """One example of T positions."""

    tokens: Int32
    """Token ids, int32 [T]."""
    loss_mask: Bool
    """Where a loss is computed, bool [T]."""
    advantage: Float32
    """Advantage of each position, float32 [T]."""
    generator_log_probs: Float32
    """Log-probabilities by the policy that generated the tokens, float32 [T]; 0 where masked."""
    segment_ids: Int32
    """Which sequence a position belongs to, int32 [T]: 1 everywhere until packed; 0 is padding."""
    source: Source
    """Where it came from."""
    reference_log_probs: Float32 | None = None
    """Log-probabilities by a reference model, float32 [T], where they are carried."""


def examples_of(batch: TrainingBatch) -> list[RLExample]:
    """The rows of a batch as examples; arrays are views of the batch's."""
    found = []
    for row, uid in enumerate(batch.uids):
        span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
        found.append(
            RLExample(
                tokens=batch.tokens[span],
                loss_mask=batch.loss_mask[span],
                advantage=batch.advantages[span],
                generator_log_probs=batch.logprobs[span],
                segment_ids=np.ones(span.stop - span.start, "<i4"),
                source=Source(batch.partition, int(batch.source_offsets[row]), uid),
                reference_log_probs=batch.reference_logprobs[span] if len(batch.reference_logprobs) else None,
            )
        )
    return found


def batch_digest(batch: TrainingBatch) -> str:
    """32 bytes, hexadecimal, over every field of a batch but the digest: names, dtypes, shapes and bits of arrays,
    canonical JSON of the rest. Does not depend on the encoding, so it survives a change of schema version.

    BLAKE2b (RFC 7693), which costs half of sha256 where the processor has no instructions for that; advantages that are
    the same over each row count once a row. Core version 1 had sha256 over every position.
    """
    first = batch.core_version < 2
    digest: Any = hashlib.sha256() if first else hashlib.blake2b(digest_size=32)
    for field in fields(batch):
        if field.name == "digest":
            continue
        name, value = field.name, getattr(batch, field.name)
        if name == "advantages" and not first and (by_row := _by_row(value, batch.splits)) is not None:
            name, value = "advantages by row", by_row
        if isinstance(value, np.ndarray):
            digest.update(f"{name}:{value.dtype.str}{value.shape}:".encode())
            digest.update(np.ascontiguousarray(value).data)
        else:
            plain = [g.__dict__ for g in value] if name == "groups" else value
            digest.update(f"{name}:{json.dumps(plain, sort_keys=True, ensure_ascii=False)}".encode())
    return str(digest.hexdigest())


def _by_row(values: Float32, splits: Int64) -> Float32 | None:
    """The value of each row where all of its positions hold the same bits; None where some row's do not."""
    lengths = np.diff(splits)
    # A batch that was tampered with must have a digest, too.
    if not len(lengths) or splits[0] != 0 or splits[-1] != len(values) or lengths.min() <= 0:
        return None
    rows = values[splits[:-1]]
    same = np.array_equal(np.repeat(rows.view("<i4"), lengths), values.view("<i4"))
    return rows if same else None
