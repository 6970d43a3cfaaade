"""Packs ragged rollouts into arrays of a few fixed shapes, so that a step compiles once for each shape (numpy only).

First-fit decreasing, deterministic: the same rollouts in the same order give the same arrays, bit for bit. The host
writes what every position has of its own, 9 bytes, and five numbers a segment; `unpacking` derives the rest on devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig, in_pairs, token_weight, trains
from rollstream.consumers.learner.training.bin_packing import layout
from rollstream.consumers.models.config import DecoderConfig, expert_dtype
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import TrainingBatch
from rollstream.topics.wire.media import Medium
from rollstream.topics.wire.rl_examples import (
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    SAMPLING_MASK_COUNTS,
    media_of_rows,
    token_arrays_of,
)

TooLong = Literal["skip", "truncate", "error"]
KEPT_POSITIONS, KEPT_TOKENS = "kept_positions", "kept_tokens"
LOSS_NUMBERS = "loss_numbers"
_FEWEST_KEPT = 4
"""Least room for kept tokens, for each position of a row."""
NO_PAIRS = (
    'learner.loss.name is "dpo", but a batch holds rollouts that are no pairs of one with an advantage above 0 and one '
    'below; set grouping.maker to "pairs" and grouping.estimator to "best_worst"'
)
_ALIGNED_BYTES = 64
"""XLA on a CPU uses an array in place if it begins at a multiple of this many bytes, and copies it otherwise."""
_NUMBERS = 5
"""What all positions of a segment have in common: its first position and its id as integers, then its advantage, the
loss weight of its trained tokens and its temperature as floats. Padding is a segment with id 0."""


class TrainingSequence(NamedTuple):
    """One rollout as the loss needs it; all arrays have shape [tokens]."""

    tokens: NDArray[np.int32]
    """Prompt and response."""
    loss_mask: NDArray[np.bool_]
    """True where the token is trained. The first token has no context and is never trained."""
    advantages: NDArray[np.float32]
    """Advantage of each token, or a single one, [1], of all tokens."""
    generator_log_probs: NDArray[np.float32]
    """Log-probability of each token under the policy that sampled it."""
    temperature: float = 1.0
    """Temperature for which the generator's log-probabilities were computed."""
    truncated: bool = False
    """Whether the rollout was cut off before it ended; the loss may leave such sequences out."""
    reference_log_probs: NDArray[np.float32] | None = None
    """Log-probability of each token under a reference policy, if the rollout carries them."""
    routed_experts: NDArray[Any] | None = None
    """Experts that computed each token, [tokens, layers, experts of a token] or [tokens, their product], if the rollout
    carries them; unsigned integers, the largest value of the dtype if they are unknown."""
    kept_counts: NDArray[Any] | None = None
    """Number of the tokens among which each token was drawn, [tokens], 0 if among all; None if every token was."""
    kept_tokens: NDArray[Any] | None = None
    """These tokens, those of the first token first, [sum of the numbers]."""
    environment: str = ""
    """Environment of the rollout, by which its loss is chosen."""
    media: tuple[Medium, ...] = ()
    """Images of the rollout; the learner's own models read none."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A microbatch: rows of `length` positions; token t is predicted from tokens before it."""

    length: int
    """Positions of a row."""
    segments: int
    """Largest number of segments of a row, padding included."""
    words: NDArray[np.int32]
    """The rows as one array for the devices, [rows, words]: see `parts`."""
    own: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays [rows, length]: "reference_log_probs" if they are asked for, and "advantages" if some segment has
    different ones, instead of the advantages of segments. "routed_experts", [rows, length, layers, experts of a token],
    if they are asked for. "loss_numbers", uint8, if there are several losses: place of each token's loss among
    LearnerConfig.every_loss. "kept_positions" and "kept_tokens", int32 [rows, M], if tokens were drawn from parts of
    the vocabulary: position in the row and one kept token each, in padding a position beyond the row."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids [rows, length]; 0 in padding."""
        return self.words[:, : self.length]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The microbatch as losses take it, arrays [rows, length]: the reference for `unpacking.unpacked`.

        tokens: token ids; 0 in padding.
        positions: position within the segment, from 0.
        segment_ids: number of the segment within its row, from 1; 0 is padding.
        loss_mask: 1 where the token is trained, else 0; never 1 at the first token of a segment.
        loss_weights: weight of the token's loss in the sum over the update, 0 where it is not trained.
        advantages, generator_log_probs: of each token.
        temperatures: sampling temperature of the token's rollout; 1 in padding.
        reference_log_probs: log-probabilities under the reference policy, if they are asked for.
        """
        tokens, log_probs, mask, table = parts(self.words, self.length)
        rows, length = tokens.shape
        used = table[:, 0] < length
        begins = (table[:, 0] + length * np.arange(rows)[:, None])[used]
        sizes = np.diff(begins, append=rows * length)
        values = (np.repeat(table[:, part][used], sizes).reshape(rows, length) for part in range(_NUMBERS))
        begin, number, advantage, weight, temperature = values
        loss_mask = mask.view(np.uint8)[:, :length].astype(np.float32)
        return {
            "tokens": tokens,
            "positions": np.where(number > 0, np.arange(length, dtype=np.int32) - begin, 0),
            "segment_ids": number,
            "loss_mask": loss_mask,
            "loss_weights": loss_mask * weight.view(np.float32),
            "advantages": advantage.view(np.float32),
            "generator_log_probs": log_probs.view(np.float32),
            "temperatures": temperature.view(np.float32),
            **self.own,
        }


def parts(words: Any, length: int) -> tuple[Any, Any, Any, Any]:
    """Split packed rows, [rows, words] with the bits of all values as int32, of numpy or JAX, by meaning.

    Returns tokens and log-probabilities under the generating policy, [rows, length], the bytes of the loss mask, [rows,
    length / 4], and the numbers of segments, [rows, 5, most segments], in the order of `_NUMBERS`.
    """
    mask, table = 2 * length, 2 * length + -(-length // 4)
    most = (words.shape[1] - table) // _NUMBERS
    segments = words[:, table : table + _NUMBERS * most].reshape(len(words), _NUMBERS, most)
    return words[:, :length], words[:, length:mask], words[:, mask:table], segments


def words_of_row(length: int, segments: int = 0) -> int:
    """Words of a packed row of `length` positions and up to `segments` segments.

    There is room for the segments of rollouts of 16 tokens on average; microbatches with more segments are larger.
    """
    most = max(segments, length // 16 + 16)
    words = 2 * length + -(-length // 4) + _NUMBERS * most
    return -(-words * 4 // _ALIGNED_BYTES) * _ALIGNED_BYTES // 4


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
    splits, reference = batch.splits.tolist(), batch.reference_logprobs
    arrays, cut, groups = token_arrays_of(batch), batch.truncated.tolist(), batch.group_index.tolist()
    temperatures = np.where(batch.logprobs_processed, batch.temperatures, 1.0).tolist()
    return [
        TrainingSequence(
            tokens=batch.tokens[start:end],
            loss_mask=batch.loss_mask[start:end],
            advantages=advantages,
            generator_log_probs=batch.logprobs[start:end],
            temperature=temperature or 1.0,
            truncated=truncated,
            reference_log_probs=reference[start:end] if len(reference) else None,
            routed_experts=named.get(ROUTED_EXPERTS),
            kept_counts=named.get(SAMPLING_MASK_COUNTS),
            kept_tokens=named.get(SAMPLING_MASK),
            environment=batch.groups[group].environment,
            media=media,
        )
        for start, end, advantages, temperature, truncated, named, group, media in zip(
            *(splits[:-1], splits[1:], _advantages(batch), temperatures, cut, arrays, groups),
            media_of_rows(batch),
            strict=True,
        )
    ]


def _advantages(batch: TrainingBatch) -> list[NDArray[np.float32]]:
    """The advantages of each row: a single one if it is the same at all positions of each row, bit for bit."""
    values, begins, ends = batch.advantages, batch.splits[:-1], batch.splits[1:]
    if len(values) != len(batch.tokens):
        begins = np.arange(len(batch))
        ends = begins + 1
    else:
        bits, changes = values.view(np.int32), np.zeros(len(values) + 1, bool)
        np.not_equal(bits[1:], bits[:-1], out=changes[1:-1])
        changes[batch.splits] = False
        if not changes.any():
            ends = begins + 1
    return [values[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


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
        losses=config.loss_of,
        carried_reference=config.reference == "carried",
        experts=config.model if config.replays_routing else None,
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
    losses: Mapping[str, LossConfig] | None = None,
    carried_reference: bool = False,
    experts: DecoderConfig | None = None,
    numbers: Sequence[int] | None = None,
    rollouts: int | None = None,
) -> PackedStep:
    """Pack sequences into few microbatches, with rows of `sequence_length` or of a shorter bucket.

    A microbatch has `rows` rows of `sequence_length`, or proportionally more rows of a bucket. Longest first, each
    sequence goes into the first row with room; shorter sequences fill room left in microbatches of longer rows before
    a microbatch of their own bucket is started. `losses`, as in LearnerConfig.loss_of, give the weights of tokens, and
    whether truncated sequences are trained on.

    With `experts`, the model whose experts are replayed, microbatches have "routed_experts", which are unknown where a
    sequence names none.

    Minibatches are contiguous ranges of the `rollouts` of the whole step; `numbers` are the positions of the given
    sequences among these rollouts. Rollouts without a sequence were left out.

    A sequence longer than `sequence_length` is left out or cut, and counted, or raises ConfigurationError. For a loss
    in pairs, rollouts 2k and 2k + 1 of the step are a pair and get into the same row, one after the other; a pair of
    which one is missing, or that is too long for a row, raises ConfigurationError.
    """
    losses = losses or {"": LossConfig()}
    numbers = range(len(sequences)) if numbers is None else numbers
    pairs = in_pairs(losses[""])
    if pairs:
        _check_pairs(sequences, numbers, sequence_length)
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
    for number, length, sequence in zip(numbers, lengths, sequences, strict=True):
        if length > sequence_length:
            if too_long == "skip":
                continue
            sequence = _cut(sequence, sequence_length)
        if losses.get(sequence.environment, losses[""]).name == "ce":
            # Supervised training is over the whole vocabulary, whoever sampled the tokens.
            sequence = sequence._replace(kept_counts=None)
        if length:
            shares[(number - number % 2 if pairs else number) * minibatches // total].append(sequence)
    shapes = _rows_by_length(rows, sequence_length, length_buckets)
    return PackedStep(
        updates=tuple(_update(share, shapes, losses, carried_reference, experts) for share in shares),
        too_long=sum(length > sequence_length for length in lengths),
    )


def _check_pairs(sequences: Sequence[TrainingSequence], numbers: Sequence[int], sequence_length: int) -> None:
    """Raise ConfigurationError unless the sequences are whole pairs, each of which fits into a row."""
    if len(sequences) % 2 or any(a + 1 != b or a % 2 for a, b in zip(numbers[::2], numbers[1::2], strict=True)):
        raise ConfigurationError("a pair lacks one of its two rollouts; exclude the batch, and report this as a defect")
    for first, second in zip(sequences[::2], sequences[1::2], strict=True):
        if sorted((first.advantages[-1] > 0, second.advantages[-1] > 0)) != [False, True]:
            raise ConfigurationError(NO_PAIRS)
        if len(first.tokens) + len(second.tokens) > sequence_length:
            raise ConfigurationError(
                f"a pair has {len(first.tokens)} + {len(second.tokens)} tokens and packed rows hold {sequence_length}; "
                'raise learner.sequence_length, or set learner.too_long to "skip"'
            )


def _rows_by_length(rows: int, sequence_length: int, buckets: Sequence[int]) -> dict[int, int]:
    lengths = sorted({*buckets, sequence_length}, reverse=True)
    return {length: rows * (sequence_length // length) for length in lengths}


def _cut(sequence: TrainingSequence, length: int) -> TrainingSequence:
    """The first tokens of a sequence, marked as truncated."""
    reference, experts = sequence.reference_log_probs, sequence.routed_experts
    counts, kept = sequence.kept_counts, sequence.kept_tokens
    return sequence._replace(
        tokens=sequence.tokens[:length],
        loss_mask=sequence.loss_mask[:length],
        advantages=sequence.advantages[:length],
        generator_log_probs=sequence.generator_log_probs[:length],
        truncated=True,
        reference_log_probs=None if reference is None else reference[:length],
        routed_experts=None if experts is None else experts[:length],
        kept_counts=None if counts is None else counts[:length],
        kept_tokens=None if counts is None or kept is None else kept[: counts[:length].sum()],
    )


def _update(
    sequences: Sequence[TrainingSequence],
    shapes: dict[int, int],
    losses: Mapping[str, LossConfig],
    reference: bool,
    experts: DecoderConfig | None,
) -> PackedUpdate:
    """Pack one update; `shapes` gives the rows of a microbatch by row length, longest first."""
    lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    if in_pairs(losses[""]):
        placed = [
            (np.stack([2 * items, 2 * items + 1], axis=1).ravel(), np.repeat(bins, 2))
            for items, bins in layout(lengths.reshape(-1, 2).sum(axis=1), shapes)
        ]
    else:
        placed = layout(lengths, shapes)
    packed = [
        _microbatch([sequences[i] for i in items[own]], bins[own] - first, rows, length, losses, reference, experts)
        for (length, rows), (items, bins) in zip(shapes.items(), placed, strict=True)
        for first in range(0, int(bins.max(initial=-1)) + 1, rows)
        for own in [(bins >= first) & (bins < first + rows)]
    ]
    trained = [count for _batch, counts in packed for count in counts]
    return PackedUpdate(
        microbatches=tuple(batch for batch, _counts in packed),
        trained_tokens=sum(trained),
        trained_sequences=len(trained),
        tokens=int(lengths.sum()),
    )


def _microbatch(
    sequences: Sequence[TrainingSequence],
    bins: NDArray[np.int64],
    rows: int,
    length: int,
    losses: Mapping[str, LossConfig],
    reference: bool,
    experts: DecoderConfig | None,
) -> tuple[PackedBatch, list[int]]:
    """The microbatch of sequences in given rows, and the number of trained tokens of each sequence that has any."""
    most = int(np.bincount(bins).max()) + 1
    words = _aligned((rows, words_of_row(length, most)), np.int32)
    tokens, log_probs, mask, table = parts(words, length)
    log_probs, mask = log_probs.view(np.float32), mask.view(np.bool_)
    own: dict[str, NDArray[Any]] = {}
    if reference:
        own["reference_log_probs"] = _aligned((rows, length), np.float32)
    if any(len(sequence.advantages) > 1 for sequence in sequences):
        own["advantages"] = _aligned((rows, length), np.float32)
    every = tuple(dict.fromkeys(losses.values()))
    if len(every) > 1:
        own[LOSS_NUMBERS] = np.zeros((rows, length), np.uint8)
    ends, counts, trained = [0] * rows, [0] * rows, []
    # Row and place within the row, then the numbers of the segment.
    segments: list[tuple[float, ...]] = []
    for row, sequence in zip(bins.tolist(), sequences, strict=True):
        loss = losses.get(sequence.environment, losses[""])
        begin, size = ends[row], len(sequence.tokens)
        ends[row] += size
        span = row, slice(begin, begin + size)
        tokens[span] = sequence.tokens
        log_probs[span] = sequence.generator_log_probs
        mask[span] = sequence.loss_mask
        mask[row, begin] = False
        for name, array in own.items():
            array[span] = every.index(loss) if name == LOSS_NUMBERS else getattr(sequence, name)
        weight, count = 0.0, int(np.count_nonzero(sequence.loss_mask[1:]))
        if count and trains(loss, sequence.truncated):
            trained.append(count)
            weight = token_weight(loss, count)
        else:
            mask[span] = False
        place = counts[row]
        counts[row] += 1
        segments.append((row, place, begin, place + 1, sequence.advantages[0], weight, sequence.temperature))
    for row, end in enumerate(ends):
        if end < length:
            for array in (tokens, log_probs, mask, *own.values()):
                array[row, end:length] = 0
            segments.append((row, counts[row], end, 0, 0.0, 0.0, 1.0))
    if experts is not None:
        own["routed_experts"] = _experts(experts, sequences, bins, rows, length)
    if any(sequence.kept_counts is not None for sequence in sequences):
        own |= _kept(sequences, bins, rows, length)
    table[:, 0] = length
    numbers = np.array(segments)
    at, place_of = numbers[:, :2].astype(np.int64).T
    table[at, :2, place_of] = numbers[:, 2:4]
    table.view(np.float32)[at, 2:, place_of] = numbers[:, 4:]
    return PackedBatch(length=length, segments=most, words=words, own=own), trained


def _experts(
    model: DecoderConfig, sequences: Sequence[TrainingSequence], bins: NDArray[np.int64], rows: int, length: int
) -> NDArray[Any]:
    """Experts of every position [rows, length, layers, experts of a token]; unknown in padding."""
    dtype, each = np.dtype(expert_dtype(model)), (model.num_hidden_layers, model.num_experts_per_tok)
    unknown = np.iinfo(dtype).max
    packed = np.full((rows, length, *each), unknown, dtype)
    ends = [0] * rows
    for row, sequence in zip(bins.tolist(), sequences, strict=True):
        begin, size = ends[row], len(sequence.tokens)
        ends[row] += size
        if (own := sequence.routed_experts) is not None:
            packed[row, begin : begin + size] = np.where(own < model.num_experts, own, unknown).reshape(size, *each)
    return packed


def _kept(
    sequences: Sequence[TrainingSequence], bins: NDArray[np.int64], rows: int, length: int
) -> dict[str, NDArray[np.int32]]:
    """The tokens among which each token was drawn, as PackedBatch.own has them."""
    positions: list[list[NDArray[Any]]] = [[] for _ in range(rows)]
    tokens: list[list[NDArray[Any]]] = [[] for _ in range(rows)]
    ends = [0] * rows
    for row, sequence in zip(bins.tolist(), sequences, strict=True):
        begin, size = ends[row], len(sequence.tokens)
        ends[row] += size
        if sequence.kept_counts is not None and sequence.kept_tokens is not None:
            # The first token of a sequence is never trained.
            first = int(sequence.kept_counts[0])
            positions[row].append(np.repeat(np.arange(begin + 1, begin + size), sequence.kept_counts[1:]))
            tokens[row].append(sequence.kept_tokens[first:])
    most = max(sum(map(len, each)) for each in tokens)
    room = _FEWEST_KEPT * length
    while room < most:
        # Few different sizes, because each of them is compiled.
        room *= 4
    own = {KEPT_POSITIONS: np.full((rows, room), 2 * length, np.int32), KEPT_TOKENS: np.zeros((rows, room), np.int32)}
    for name, by_row in ((KEPT_POSITIONS, positions), (KEPT_TOKENS, tokens)):
        for row, each in enumerate(by_row):
            if each:
                joined = np.concatenate(each)
                own[name][row, : len(joined)] = joined
    return own


def _aligned(shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
    """An array with arbitrary values that a device of the CPU uses in place."""
    size_bytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
    memory = np.empty(size_bytes + _ALIGNED_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGNED_BYTES
    array: NDArray[Any] = memory[begin : begin + size_bytes].view(dtype).reshape(shape)
    return array
