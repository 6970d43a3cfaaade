"""RLExample: one training example in the form trainers take, and the conversion of a TrainingBatch to a list of them.

Batch makers produce this dataclass and learners consume it; it carries its place in the log.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.records import BatchTokenArray, Bool, Float32, Int32, Int64, NamedArray, TrainingBatch

REFERENCE = "reference_log_probs"
"""Key, in a rollout's token_arrays, of the log-probabilities by a reference model."""
WEIGHT_VERSION = "weight_version"
"""Key, in a rollout's token_arrays, of the policy version that sampled each token, int64 [T]; -1 if not sampled."""


class Source(NamedTuple):
    """Place of an example in `rollouts`."""

    partition: int
    offset: int
    uid: str


@dataclass(frozen=True, kw_only=True)
class RLExample:
    """One example of T positions."""

    tokens: Int32
    """Token ids, int32 [T]."""
    loss_mask: Bool
    """True at positions that enter the loss, bool [T]."""
    advantage: Float32
    """Advantage of each position, float32 [T]."""
    generator_log_probs: Float32
    """Log-probabilities by the policy that generated the tokens, float32 [T]; 0 where masked."""
    segment_ids: Int32
    """Number of the sequence a position belongs to, int32 [T]: 1 everywhere until packed; 0 is padding."""
    source: Source
    """Its place in the log."""
    reference_log_probs: Float32 | None = None
    """Log-probabilities by a reference model, float32 [T]; None if the rollout carries none."""
    weight_step: int = -1
    """Learner step of the weights that sampled it; -1 if it is unknown."""
    timestamp: float = 0.0
    """Wall time of the rollout, seconds since the Unix epoch, by its worker's clock; 0 if it is unknown."""
    token_arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays named by grouping.token_arrays that the rollout carries, each [T, ...] in its own dtype."""


def examples_of(batch: TrainingBatch) -> list[RLExample]:
    """Return the rows of a batch as examples; their arrays are views of the batch's arrays."""
    examples = []
    arrays = token_arrays_of(batch)
    for row, uid in enumerate(batch.uids):
        span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
        examples.append(
            RLExample(
                tokens=batch.tokens[span],
                loss_mask=batch.loss_mask[span],
                advantage=batch.advantages[span],
                generator_log_probs=batch.logprobs[span],
                segment_ids=np.ones(span.stop - span.start, "<i4"),
                source=Source(batch.partition, int(batch.source_offsets[row]), uid),
                reference_log_probs=reference_of(batch, row),
                weight_step=int(batch.weight_steps[row]),
                timestamp=float(batch.timestamps[row]),
                token_arrays=arrays[row],
            )
        )
    return examples


def reference_of(batch: TrainingBatch, row: int) -> Float32 | None:
    """Return a view of the reference log-probabilities of a row; None if the row carries none.

    If other rows of the batch carry them, a row without them holds NaN.
    """
    span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
    logprobs = batch.reference_logprobs[span]
    return None if not len(batch.reference_logprobs) or np.isnan(logprobs).any() else logprobs


def stamp_of(batch: TrainingBatch, row: int) -> tuple[int, float]:
    """Return the learner step of the weights that sampled a row, -1 if unknown, and the row's time in seconds.

    The time is the rollout's own, or the sealing time of its group if that is earlier, so that a worker whose clock is
    ahead cannot keep its rollouts fresh. A row whose rollout has no time gets the opening time of its group.
    """
    group = batch.groups[int(batch.group_index[row])]
    timestamp = float(batch.timestamps[row])
    own = min(timestamp, group.sealed_ms / 1000) if timestamp > 0 else group.opened_ms / 1000
    return int(batch.weight_steps[row]), own


def token_arrays_of(batch: TrainingBatch) -> list[dict[str, NDArray[Any]]]:
    """Return views of the named arrays of each row. Raises RecordError if the shape of an array is invalid."""
    lengths = np.diff(batch.splits)
    by_row: list[dict[str, NDArray[Any]]] = [{} for _ in batch.uids]
    for entry in batch.token_arrays:
        ends = np.cumsum(lengths[entry.rows]) if len(entry.rows) else np.zeros(0, np.int64)
        parts = np.split(entry.array.array(), ends[:-1]) if len(ends) else []
        for row, part in zip(entry.rows.tolist(), parts, strict=True):
            by_row[row][entry.name] = part
    return by_row


def chosen_token_arrays(batch: TrainingBatch, rows: Sequence[int]) -> tuple[BatchTokenArray, ...]:
    """Return the named arrays of a batch, reduced to these rows in this order. Raises as `token_arrays_of` does."""
    by_row = token_arrays_of(batch)
    chosen = []
    for entry in batch.token_arrays:
        carriers = frozenset(entry.rows.tolist())
        numbers = [number for number, row in enumerate(rows) if row in carriers]
        if numbers:
            joined = np.concatenate([by_row[rows[number]][entry.name] for number in numbers])
            array = NamedArray.of(joined)
            chosen.append(BatchTokenArray(name=entry.name, array=array, rows=np.array(numbers, "<i4")))
    return tuple(chosen)


def batch_digest(batch: TrainingBatch) -> str:
    """Return a digest, 32 bytes in hexadecimal, over all fields of a batch but `digest`: names, dtypes, shapes and bits
    of arrays, and canonical JSON of other fields. It is independent of the encoding and thus of the schema version.

    BLAKE2b (RFC 7693) costs half as much as sha256 on processors without instructions for sha256. If the advantages of
    every row are the same at all its positions, one value for each row is digested.
    """
    digest = hashlib.blake2b(digest_size=32)
    for column in fields(batch):
        if column.name == "digest":
            continue
        name, value = column.name, getattr(batch, column.name)
        if column.name == "token_arrays":
            for entry in batch.token_arrays:
                shape = entry.array.shape
                digest.update(f"{name}:{entry.name}:{entry.array.dtype}{shape}{entry.rows.tolist()}:".encode())
                digest.update(entry.array.data)
            continue
        if name == "advantages" and (by_row := _by_row(value, batch.splits)) is not None:
            name, value = "advantages by row", by_row
        if isinstance(value, np.ndarray):
            digest.update(f"{name}:{value.dtype.str}{value.shape}:".encode())
            digest.update(np.ascontiguousarray(value).data)
        else:
            plain = [g.__dict__ for g in value] if name == "groups" else value
            digest.update(f"{name}:{json.dumps(plain, sort_keys=True, ensure_ascii=False)}".encode())
    return str(digest.hexdigest())


def _by_row(values: Float32, splits: Int64) -> Float32 | None:
    """Return one value for each row if all positions within a row hold the same bits; None otherwise, and if `splits`
    is invalid or a row is empty."""
    lengths = np.diff(splits)
    # A corrupted batch must have a digest, too.
    if not len(lengths) or splits[0] != 0 or splits[-1] != len(values) or lengths.min() <= 0:
        return None
    bits = values.view("<i4")
    changes = bits[1:] != bits[:-1]
    same = np.count_nonzero(changes) == np.count_nonzero(changes[splits[1:-1] - 1])
    return values[splits[:-1]] if same else None
