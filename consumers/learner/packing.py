"""Packs ragged rollouts into arrays of one fixed shape, so that a training step compiles once (numpy only).

First-fit decreasing, deterministic: the same rollouts in the same order give the same arrays, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from consumers.learner.objective import LossConfig, token_weight
from topics.errors import ConfigurationError
from topics.records import TrainingBatch


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
    """Temperature at which the generator's log-probabilities hold."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A microbatch: every array is [rows, sequence_length], and token t is predicted from tokens before it."""

    tokens: NDArray[np.int32]
    """Token ids, 0 where there is none."""
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

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The arrays by name, as jitted functions take them."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, kw_only=True)
class PackedStep:
    """Everything one optimizer update trains on."""

    microbatches: tuple[PackedBatch, ...]
    """At least one, all of the same shape."""
    trained_tokens: int
    """Sum of the loss masks: the denominator of the token mean."""
    trained_sequences: int
    """Sequences with a trained token: the denominator of means over sequences."""
    tokens: int
    """Tokens that are not padding."""

    @property
    def padding_fraction(self) -> float:
        """Share of the arrays' positions that hold no token."""
        capacity = sum(microbatch.tokens.size for microbatch in self.microbatches)
        return 1.0 - self.tokens / capacity


def sequences_of(batch: TrainingBatch) -> list[TrainingSequence]:
    """The rows of a batch; arrays are views of the batch's.

    Log-probabilities that were recorded before temperature ("raw"), and greedy ones, hold at temperature 1.
    """
    per_token = batch.advantages
    if len(per_token) != len(batch.tokens):
        per_token = np.repeat(per_token, np.diff(batch.splits))
    found = []
    for row in range(len(batch)):
        span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
        temperature = float(batch.temperatures[row]) if batch.logprobs_processed[row] else 1.0
        found.append(
            TrainingSequence(
                tokens=batch.tokens[span],
                loss_mask=batch.loss_mask[span],
                advantages=per_token[span],
                generator_log_probs=batch.logprobs[span],
                temperature=temperature or 1.0,
            )
        )
    return found


def pack(
    sequences: Sequence[TrainingSequence], *, rows: int, sequence_length: int, loss: LossConfig | None = None
) -> PackedStep:
    """Pack sequences into microbatches of shape [rows, sequence_length], their tokens weighed as `loss` says.

    Longest first, each into the first row with room, ties in the order given. Raises ConfigurationError for a
    sequence longer than a row.
    """
    loss = loss or LossConfig()
    layout = first_fit_decreasing([len(sequence.tokens) for sequence in sequences], sequence_length)
    microbatches = []
    for start in range(0, max(len(layout), 1), rows):
        microbatches.append(_fill(sequences, layout[start : start + rows], rows, sequence_length, loss))
    return PackedStep(
        microbatches=tuple(microbatches),
        trained_tokens=int(sum(microbatch.loss_mask.sum(dtype=np.int64) for microbatch in microbatches)),
        trained_sequences=sum(bool(sequence.loss_mask[1:].any()) for sequence in sequences),
        tokens=sum(len(sequence.tokens) for sequence in sequences),
    )


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the items in each bin; bins hold at most `capacity`."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        length = lengths[index]
        if length > capacity:
            raise ConfigurationError(
                f"a rollout has {length} tokens and packed rows hold {capacity}; "
                f"set learner.sequence_length to at least {length}"
            )
        if length == 0:
            continue
        row = next((row for row, free in enumerate(room) if free >= length), None)
        if row is None:
            row = len(bins)
            bins.append([])
            room.append(capacity)
        bins[row].append(index)
        room[row] -= length
    return bins


def _fill(
    sequences: Sequence[TrainingSequence],
    layout: Sequence[Sequence[int]],
    rows: int,
    sequence_length: int,
    loss: LossConfig,
) -> PackedBatch:
    shape = (rows, sequence_length)
    packed = PackedBatch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.float32),
        loss_weights=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        generator_log_probs=np.zeros(shape, np.float32),
        temperatures=np.ones(shape, np.float32),
    )
    for row, members in enumerate(layout):
        start = 0
        for segment, index in enumerate(members, start=1):
            sequence = sequences[index]
            length = len(sequence.tokens)
            where = (row, slice(start, start + length))
            packed.tokens[where] = sequence.tokens
            packed.positions[where] = np.arange(length)
            packed.segment_ids[where] = segment
            packed.loss_mask[where] = sequence.loss_mask
            packed.loss_mask[row, start] = 0.0
            trained = int(packed.loss_mask[where].sum())
            packed.loss_weights[where] = packed.loss_mask[where] * token_weight(loss, max(trained, 1))
            packed.advantages[where] = sequence.advantages
            packed.generator_log_probs[where] = sequence.generator_log_probs
            packed.temperatures[where] = sequence.temperature
            start += length
    return packed
