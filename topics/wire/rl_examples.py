"""RLExample: one training example in the form trainers take, and the conversion of a TrainingBatch to a list of them.

Batch makers produce this dataclass and learners consume it; it carries its place in the log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
from rollstream.topics.records import BatchTokenArray, Bool, Float32, Int32, NamedArray, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.media import MEDIA_TOKENS, Medium, is_medium, media_of

REFERENCE = "reference_log_probs"
"""Key, in a rollout's token_arrays, of the log-probabilities by a reference model."""
WEIGHT_VERSION = "weight_version"
"""Key, in a rollout's token_arrays, of the policy version that sampled each token, int64 [T]; -1 if not sampled."""

ROUTED_EXPERTS = "routed_experts"
"""Key, in a rollout's token_arrays, of the experts that computed each token when it was sampled, [T, layers, experts of
a token], or [T, the product of both], of |u1 or <u2; the largest value of the dtype where they are unknown."""
SAMPLING_MASK = "sampling_mask"
"""Key, in a rollout's token_arrays, of the tokens among which top_p, top_k and min_p let each token be drawn, <i4 [K]:
those of the first token first. Its first axis is not that of the tokens, as that of `media` is not."""
SAMPLING_MASK_COUNTS = "sampling_mask_counts"
"""Key, in a rollout's token_arrays, of the number of these for each token, <i4 [T]; 0 if it was not sampled."""
REPLAYED = (ROUTED_EXPERTS, SAMPLING_MASK, SAMPLING_MASK_COUNTS, MEDIA_TOKENS)
"""Keys of the arrays that batches always carry, as they do images, because a learner's forward pass needs them."""
IN_THE_RECORD = frozenset((REFERENCE, WEIGHT_VERSION, SAMPLING_MASK_COUNTS, MEDIA_TOKENS))
"""Arrays of one number for each token, which are in the record whatever their size: grouping or the page reads them."""


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
    stored_arrays: Mapping[str, NamedArray] = field(default_factory=dict)
    """Such arrays that lie in the store and were not fetched; `StoredArrays.load` reads one."""

    @property
    def length(self) -> int:
        """Number of positions, T."""
        return len(self.tokens)

    @property
    def media(self) -> tuple[Medium, ...]:
        """Images of the rollout, in order; their bytes are there if they were fetched."""
        return _media_of(self.token_arrays, self.stored_arrays)


def examples_of(batch: TrainingBatch) -> list[RLExample]:
    """Return the rows of a batch as examples; their arrays are views of the batch's arrays."""
    examples = []
    arrays, stored = token_arrays_of(batch), stored_arrays_of(batch)
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
                stored_arrays=stored[row],
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
    """Return views of the named arrays of each row that are in the batch. Raises RecordError if the shape of an array
    is invalid."""
    by_row: list[dict[str, NDArray[Any]]] = [{} for _ in batch.uids]
    for entry in batch.token_arrays:
        if entry.array.stored:
            continue
        ends = np.cumsum(lengths_of(entry, batch))
        parts = np.split(entry.array.array(), ends[:-1]) if len(ends) else []
        for row, part in zip(entry.rows.tolist(), parts, strict=True):
            by_row[row][entry.name] = part
    return by_row


def lengths_of(entry: BatchTokenArray, batch: TrainingBatch) -> NDArray[np.int64]:
    """Return the length of a named array in each of its rows. Raises RecordError for a mask without its counts."""
    lengths = np.diff(batch.splits)
    if is_medium(entry.name):
        return np.array(entry.array.shape[:1], np.int64)
    if entry.name != SAMPLING_MASK:
        return lengths[entry.rows]
    counts = next((each for each in batch.token_arrays if each.name == SAMPLING_MASK_COUNTS), None)
    places = {} if counts is None else {row: place for place, row in enumerate(counts.rows.tolist())}
    rows = entry.rows.tolist()
    if counts is None or not set(rows) <= places.keys() <= set(range(len(lengths))):
        raise RecordError(f"a batch has {SAMPLING_MASK} without {SAMPLING_MASK_COUNTS} of the same rows")
    ends, numbers = np.cumsum(lengths[counts.rows]), counts.array.array()
    if numbers.shape != (ends[-1] if len(ends) else 0,):
        raise RecordError(f"{SAMPLING_MASK_COUNTS} of a batch has the shape {numbers.shape}")
    parts = np.split(numbers, ends[:-1])
    return np.array([parts[places[row]].sum(dtype=np.int64) for row in rows], np.int64)


def stored_arrays_of(batch: TrainingBatch) -> list[dict[str, NamedArray]]:
    """Return the named arrays of each row that lie in the store."""
    by_row: list[dict[str, NamedArray]] = [{} for _ in batch.uids]
    for entry in batch.token_arrays:
        if entry.array.stored:
            by_row[int(entry.rows[0])][entry.name] = entry.array
    return by_row


def media_of_rows(batch: TrainingBatch) -> list[tuple[Medium, ...]]:
    """Return the images of each row, in order; their bytes are there if they were fetched."""
    if not any(is_medium(entry.name) for entry in batch.token_arrays):
        return [()] * len(batch)
    return [_media_of(*row) for row in zip(token_arrays_of(batch), stored_arrays_of(batch), strict=True)]


def _media_of(arrays: Mapping[str, NDArray[Any]], stored: Mapping[str, NamedArray]) -> tuple[Medium, ...]:
    of_media = {n: NamedArray.of(array) for n, array in arrays.items() if is_medium(n) or n == MEDIA_TOKENS}
    return media_of({**of_media, **stored})


def chosen_token_arrays(batch: TrainingBatch, rows: Sequence[int]) -> tuple[BatchTokenArray, ...]:
    """Return the named arrays of a batch, reduced to these rows in this order. Raises as `token_arrays_of` does."""
    by_row = token_arrays_of(batch)
    chosen = []
    for entry in batch.token_arrays:
        carriers = frozenset(entry.rows.tolist())
        numbers = [number for number, row in enumerate(rows) if row in carriers]
        if entry.array.stored or is_medium(entry.name):
            chosen += [replace(entry, rows=np.array([number], "<i4")) for number in numbers]
        elif numbers:
            joined = np.concatenate([by_row[rows[number]][entry.name] for number in numbers])
            array = NamedArray.of(joined)
            chosen.append(BatchTokenArray(name=entry.name, array=array, rows=np.array(numbers, "<i4")))
    return tuple(chosen)


def batch_digest(batch: TrainingBatch) -> str:
    """Return the digest of a batch, 32 bytes in hexadecimal: BLAKE3 over its record as `codec.encode` writes it, from
    the header up to the field `digest`, which is the last one."""
    return blake3(encode(replace(batch, digest=""))[: -len(_NO_DIGEST)]).hexdigest()


def digested(body: bytes) -> tuple[bytes, str]:
    """Return the frame of a batch from all of its bytes before the digest, and that digest."""
    digest = str(blake3(body).hexdigest())
    return b"".join((body, _DIGEST_LENGTH, digest.encode())), digest


def has_digest(frame: bytes, digest: str) -> bool:
    """Whether the bytes of a batch's record have this digest and carry it.

    If so, it is what `batch_digest` returns for the batch. Nothing follows from False: the same content may have been
    written in another form.
    """
    carried = _DIGEST_LENGTH + digest.encode()
    return frame.endswith(carried) and blake3(memoryview(frame)[: -len(carried)]).hexdigest() == digest


_NO_DIGEST, _DIGEST_LENGTH = b"\x00", b"\x80\x01"
"""Avro's lengths of an empty string and of one of 64 bytes."""
