"""Packs ragged rollouts into arrays of a few fixed shapes, so that a step compiles once for each shape (numpy only).

First-fit decreasing, deterministic: the same rollouts in the same order give the same arrays, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.bin_packing import layout
from rollstream.consumers.learner.training.objective import LossConfig, token_weight, trains
from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import TrainingBatch

TooLong = Literal["skip", "truncate", "error"]
_INTEGERS = ("tokens", "positions", "segment_ids")
_MEMORY = ReusedMemory(256 * 1024 * 1024)


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """One rollout as the loss needs it; all arrays have shape [tokens]."""

    tokens: NDArray[np.int32]
    """Prompt and response."""
    loss_mask: NDArray[np.bool_]
    """True where the token is trained. The first token has no context and is never trained."""
    advantages: NDArray[np.float32]
    """Advantage of each token."""
    generator_log_probs: NDArray[np.float32]
    """Log-probability of each token under the policy that sampled it."""
    temperature: float = 1.0
    """Temperature for which the generator's log-probabilities were computed."""
    truncated: bool = False
    """Whether the rollout was cut off before it ended; the loss may leave such sequences out."""
    reference_log_probs: NDArray[np.float32] | None = None
    """Log-probability of each token under a reference policy, if the rollout carries them."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A microbatch: every array is [rows, length], and token t is predicted from tokens before it."""

    tokens: NDArray[np.int32]
    """Token ids; 0 in padding."""
    positions: NDArray[np.int32]
    """Position within the segment, from 0."""
    segment_ids: NDArray[np.int32]
    """Number of the segment within its row, from 1; 0 is padding."""
    loss_mask: NDArray[np.float32]
    """1 where the token is trained, else 0; never 1 at the first token of a segment."""
    loss_weights: NDArray[np.float32]
    """Weight of the token's loss in the sum over the update, 0 where it is not trained."""
    advantages: NDArray[np.float32]
    """Advantages."""
    generator_log_probs: NDArray[np.float32]
    """Log-probabilities under the generating policy."""
    temperatures: NDArray[np.float32]
    """Sampling temperature of the token's rollout; 1 in padding."""
    reference_log_probs: NDArray[np.float32] | None = None
    """Log-probabilities under the reference policy, if rollouts carry them."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that are present, by name, as jitted functions take them."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: array for name, array in named.items() if array is not None}


@dataclass(frozen=True, kw_only=True)
class PackedUpdate:
    """Input of one optimizer update."""

    microbatches: tuple[PackedBatch, ...]
    """Microbatches, longest rows first; none if there is no rollout."""
    trained_tokens: int
    """Sum of the loss masks: the denominator of the token mean."""
    trained_sequences: int
    """Sequences with a trained token: the denominator of means over sequences."""
    tokens: int
    """Tokens that are not padding."""


@dataclass(frozen=True, kw_only=True)
class PackedStep:
    """Input of one step: one update for each minibatch."""

    updates: tuple[PackedUpdate, ...]
    """Updates in order; each may be empty."""
    too_long: int
    """Rollouts left out or cut because no row holds them."""

    @property
    def microbatches(self) -> tuple[PackedBatch, ...]:
        """Microbatches of all updates."""
        return tuple(microbatch for update in self.updates for microbatch in update.microbatches)

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of all updates."""
        return sum(update.trained_tokens for update in self.updates)

    @property
    def trained_sequences(self) -> int:
        """Sum of `trained_sequences` over all updates."""
        return sum(update.trained_sequences for update in self.updates)

    @property
    def tokens(self) -> int:
        """Tokens of all updates that are not padding."""
        return sum(update.tokens for update in self.updates)

    @property
    def padding_fraction(self) -> float:
        """Share of the arrays' positions that hold no token."""
        capacity = sum(microbatch.tokens.size for microbatch in self.microbatches)
        return 1.0 - self.tokens / capacity if capacity else 0.0


def sequences_of(batch: TrainingBatch) -> list[TrainingSequence]:
    """The rows of a batch as sequences, whose arrays are views of the batch.

    Log-probabilities recorded before the temperature was applied ("raw") or under greedy sampling are at temperature 1.
    """
    per_token = batch.advantages
    if len(per_token) != len(batch.tokens):
        per_token = np.repeat(per_token, np.diff(batch.splits))
    splits, reference = batch.splits.tolist(), batch.reference_logprobs
    temperatures = np.where(batch.logprobs_processed, batch.temperatures, 1.0).tolist()
    return [
        TrainingSequence(
            tokens=batch.tokens[start:end],
            loss_mask=batch.loss_mask[start:end],
            advantages=per_token[start:end],
            generator_log_probs=batch.logprobs[start:end],
            temperature=temperature or 1.0,
            truncated=truncated,
            reference_log_probs=reference[start:end] if len(reference) else None,
        )
        for start, end, temperature, truncated in zip(
            splits[:-1], splits[1:], temperatures, batch.truncated.tolist(), strict=True
        )
    ]


def rows_by_length(config: LearnerConfig) -> dict[int, int]:
    """Rows of a microbatch over all processes, by row length, longest first; all shapes have similar token counts."""
    return _rows_by_length(config.microbatch_rows, config.sequence_length, config.length_buckets)


def pack_for(
    config: LearnerConfig,
    sequences: Sequence[TrainingSequence],
    *,
    numbers: Sequence[int] | None = None,
    rollouts: int | None = None,
) -> PackedStep:
    """Pack a step with the settings of a learner."""
    return pack(
        sequences,
        rows=config.microbatch_rows,
        sequence_length=config.sequence_length,
        length_buckets=config.length_buckets,
        minibatches=config.minibatches,
        # "refuse" checks the settings at the start; a step on record may still have rollouts that are too long, which
        # are left out.
        too_long="skip" if config.too_long == "refuse" else config.too_long,
        loss=config.loss,
        carried_reference=config.reference == "carried",
        numbers=numbers,
        rollouts=rollouts,
    )


def pack(
    sequences: Sequence[TrainingSequence],
    *,
    rows: int,
    sequence_length: int,
    length_buckets: Sequence[int] = (),
    minibatches: int = 1,
    too_long: TooLong = "error",
    loss: LossConfig | None = None,
    carried_reference: bool = False,
    numbers: Sequence[int] | None = None,
    rollouts: int | None = None,
) -> PackedStep:
    """Pack sequences into few microbatches, with rows of `sequence_length` or of a shorter bucket.

    A microbatch has `rows` rows of `sequence_length`, or proportionally more rows of a bucket. Longest first, each
    sequence goes into the first row with room; shorter sequences fill room left in microbatches of longer rows before
    a microbatch of their own bucket is started. `loss` gives the weights of tokens, and whether truncated sequences
    are trained on.

    Minibatches are contiguous ranges of the `rollouts` of the whole step; `numbers` are the positions of the given
    sequences among these rollouts. Rollouts without a sequence were left out.

    A sequence longer than `sequence_length` is left out or cut, and counted, or raises ConfigurationError.
    """
    loss = loss or LossConfig()
    lengths = [len(sequence.tokens) for sequence in sequences]
    longest = max(lengths, default=0)
    if longest > sequence_length and too_long == "error":
        raise ConfigurationError(
            f"a rollout has {longest} tokens and packed rows hold {sequence_length}; set learner.sequence_length to at "
            f'least {longest}, or learner.too_long to "skip" or "truncate"'
        )
    if carried_reference and any(sequence.reference_log_probs is None for sequence in sequences):
        raise ConfigurationError(
            'learner.reference is "carried", but some rollouts have no reference log-probabilities; configure the '
            'workers to send them, or set learner.reference to "initial" or a directory'
        )
    total = len(sequences) if rollouts is None else rollouts
    shares: list[list[TrainingSequence]] = [[] for _ in range(minibatches)]
    for number, length, sequence in zip(numbers or range(len(sequences)), lengths, sequences, strict=True):
        if length > sequence_length:
            if too_long == "skip":
                continue
            sequence = _cut(sequence, sequence_length)
        if length:
            shares[number * minibatches // total].append(sequence)
    shapes = _rows_by_length(rows, sequence_length, length_buckets)
    return PackedStep(
        updates=tuple(_update(share, shapes, loss, carried_reference) for share in shares),
        too_long=sum(length > sequence_length for length in lengths),
    )


def _rows_by_length(rows: int, sequence_length: int, buckets: Sequence[int]) -> dict[int, int]:
    lengths = sorted({*buckets, sequence_length}, reverse=True)
    return {length: rows * (sequence_length // length) for length in lengths}


def _cut(sequence: TrainingSequence, length: int) -> TrainingSequence:
    """The first tokens of a sequence, marked as truncated."""
    reference = sequence.reference_log_probs
    return replace(
        sequence,
        tokens=sequence.tokens[:length],
        loss_mask=sequence.loss_mask[:length],
        advantages=sequence.advantages[:length],
        generator_log_probs=sequence.generator_log_probs[:length],
        truncated=True,
        reference_log_probs=None if reference is None else reference[:length],
    )


def _update(
    sequences: Sequence[TrainingSequence], shapes: dict[int, int], loss: LossConfig, reference: bool
) -> PackedUpdate:
    """Pack one update; `shapes` gives the rows of a microbatch by row length, longest first."""
    lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    packed = [
        _fill([sequences[index] for index in items], bins, rows, length, loss, reference)
        for (length, rows), (items, bins) in zip(shapes.items(), layout(lengths, shapes), strict=True)
        if len(items)
    ]
    trained = [count for _bucket, counts in packed for count in counts]
    return PackedUpdate(
        microbatches=tuple(microbatch for bucket, _counts in packed for microbatch in bucket),
        trained_tokens=sum(trained),
        trained_sequences=len(trained),
        tokens=int(lengths.sum()),
    )


def unfilled(rows: int, length: int, reference: bool) -> tuple[PackedBatch, NDArray[np.int32]]:
    """A microbatch with arbitrary values, and all its arrays as one: their bits, int32 [arrays, rows, length]."""
    names = [item.name for item in fields(PackedBatch) if reference or item.name != "reference_log_probs"]
    whole = _MEMORY.lanes(len(names), 4 * rows * length).view(np.int32).reshape(len(names), rows, length)
    arrays: dict[str, Any] = {
        name: bits if name in _INTEGERS else bits.view(np.float32) for name, bits in zip(names, whole, strict=True)
    }
    return PackedBatch(**arrays), whole


def _fill(
    sequences: Sequence[TrainingSequence],
    bins: NDArray[np.int64],
    rows: int,
    length: int,
    loss: LossConfig,
    reference: bool,
) -> tuple[list[PackedBatch], list[int]]:
    """The microbatches of one bucket, and the number of trained tokens of each sequence that has any."""
    total = rows * (-(-(int(bins.max()) + 1) // rows))
    packed, whole = unfilled(total, length, reference)
    positions = np.arange(length, dtype=np.int32)
    ends, segments, trained = [0] * total, [0] * total, []
    for row, sequence in zip(bins.tolist(), sequences, strict=True):
        begin, size = ends[row], len(sequence.tokens)
        ends[row] += size
        segments[row] += 1
        span = row, slice(begin, begin + size)
        packed.tokens[span] = sequence.tokens
        packed.positions[span] = positions[:size]
        packed.segment_ids[span] = segments[row]
        packed.advantages[span] = sequence.advantages
        packed.generator_log_probs[span] = sequence.generator_log_probs
        packed.temperatures[span] = sequence.temperature
        if packed.reference_log_probs is not None:
            packed.reference_log_probs[span] = sequence.reference_log_probs
        mask, weights = packed.loss_mask[span], packed.loss_weights[span]
        tokens = int(np.count_nonzero(sequence.loss_mask[1:]))
        if tokens and trains(loss, sequence.truncated):
            trained.append(tokens)
            mask[0] = 0
            mask[1:] = sequence.loss_mask[1:]
            np.multiply(mask, np.float32(token_weight(loss, tokens)), out=weights)
        else:
            mask.fill(0)
            weights.fill(0)
    # Padding is written only where there is no token, so that memory is written once.
    for row, end in enumerate(ends):
        if end < length:
            whole[:, row, end:] = 0
            packed.temperatures[row, end:] = 1
    arrays = packed.arrays()
    microbatches = [
        PackedBatch(**{name: array[first : first + rows] for name, array in arrays.items()})
        for first in range(0, total, rows)
    ]
    return microbatches, trained
