"""Microbatches derived from packed rows, by numpy and on devices, have the bits that writing every position gives."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig, token_weight, trains
from rollstream.consumers.learner.training.bin_packing import layout
from rollstream.consumers.learner.training.packing import (
    PackedBatch,
    PackedStep,
    TrainingSequence,
    pack_for,
    parts,
    rows_by_length,
    words_of_row,
)
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.learner.training.unpacking import unpacked
from rollstream.consumers.models.config import DecoderConfig

CONFIG = LearnerConfig(
    model=DecoderConfig(num_hidden_layers=1),
    microbatch_rows=3,
    sequence_length=70,
    length_buckets=(33,),
    loss=LossConfig(name="grpo"),
)
SHORT = 2
"""Tokens of rollouts of which more are in a row than packed rows have room for."""


def drawn(draw: np.random.Generator, count: int, most_tokens: int, *, spread: bool = False) -> list[TrainingSequence]:
    """Rollouts with advantages for each token (`spread`) or for all together, some of which are not trained."""
    sequences = []
    for _ in range(count):
        length = int(draw.integers(1, most_tokens + 1))
        log_probs = np.where(draw.random((2, length)) < 0.2, -0.0, draw.normal(size=(2, length))).astype(np.float32)
        advantages = np.where(draw.random(length) < 0.2, -0.0, draw.normal(size=length)).astype(np.float32)
        sequences.append(
            TrainingSequence(
                tokens=draw.integers(0, 99, length).astype(np.int32),
                loss_mask=draw.random(length) < draw.choice([0.0, 0.7]),
                advantages=advantages if spread else advantages[:1],
                generator_log_probs=log_probs[0],
                temperature=float(draw.uniform(0.1, 2.0)),
                truncated=bool(draw.integers(2)),
                reference_log_probs=log_probs[1],
            )
        )
    return sequences


def written(config: LearnerConfig, sequences: Sequence[TrainingSequence]) -> list[dict[str, np.ndarray]]:
    """The microbatches of one update with every position written out."""
    shapes, microbatches = rows_by_length(config), []
    lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    for (length, rows), (items, bins) in zip(shapes.items(), layout(lengths, shapes), strict=True):
        shape = (-(-(int(bins.max(initial=-1)) + 1) // rows) * rows, length)
        arrays: dict[str, Any] = {
            name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids")
        } | {
            name: np.zeros(shape, np.float32)
            for name in ("loss_mask", "loss_weights", "advantages", "generator_log_probs", "reference_log_probs")
        }
        arrays["temperatures"] = np.ones(shape, np.float32)
        for item, row in zip(items.tolist(), bins.tolist(), strict=True):
            sequence, before = sequences[item], arrays["segment_ids"][row]
            where = row, slice(np.count_nonzero(before), np.count_nonzero(before) + len(sequence.tokens))
            arrays["segment_ids"][where] = before.max() + 1
            arrays["positions"][where] = np.arange(len(sequence.tokens))
            mask = sequence.loss_mask & (np.arange(len(sequence.tokens)) > 0) & trains(config.loss, sequence.truncated)
            arrays["loss_mask"][where] = mask
            arrays["loss_weights"][where] = mask * np.float32(token_weight(config.loss, max(1, int(mask.sum()))))
            arrays["temperatures"][where] = sequence.temperature
            for name in ("tokens", "advantages", "generator_log_probs", "reference_log_probs"):
                arrays[name][where] = getattr(sequence, name)
        if config.reference != "carried":
            arrays.pop("reference_log_probs")
        for first in range(0, shape[0], rows):
            microbatches.append({name: array[first : first + rows] for name, array in arrays.items()})
    return microbatches


@cache
def unpacking(length: int) -> Any:
    return jax.jit(partial(unpacked, length=length))


def on_devices(batch: PackedBatch) -> dict[str, Any]:
    return {**unpacking(batch.length)(batch.words, np.int32(batch.segments)), **batch.own}


def assert_same_bits(actual: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        given = np.asarray(actual[name])
        assert given.dtype == array.dtype, name
        np.testing.assert_array_equal(given.view(np.int32), array.view(np.int32), name)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("reference", ["", "carried"])
@pytest.mark.parametrize("seed", range(3))
def test_packed_rows_have_the_bits_of_a_microbatch_written_out(seed: int, reference: str, spread: bool) -> None:
    config = replace(CONFIG, reference=reference)
    sequences = drawn(np.random.default_rng(seed), 60, [70, 33, 12][seed], spread=spread)
    step = pack_for(config, sequences)
    expected = written(config, sequences)
    assert len(step.microbatches) == len(expected) > 1
    for microbatch, arrays in zip(step.microbatches, expected, strict=True):
        assert ("advantages" in microbatch.own) == spread
        assert_same_bits(microbatch.arrays(), arrays)
        assert_same_bits(on_devices(microbatch), arrays)


def short_rollouts() -> PackedStep:
    return pack_for(CONFIG, drawn(np.random.default_rng(0), 300, SHORT))


def test_rows_with_more_segments_than_packed_rows_have_room_for_are_put_as_they_are_written_out() -> None:
    step = short_rollouts()
    expected = written(CONFIG, drawn(np.random.default_rng(0), 300, SHORT))
    (update,) = TrainStep(CONFIG).place(step).updates
    beyond = [packed.words.shape[1] > words_of_row(packed.length) for packed in step.microbatches]
    assert beyond.count(True) > 1
    assert [placed.words is None for placed in update.microbatches] == beyond
    for placed, arrays in zip(update.microbatches, expected, strict=True):
        if placed.words is None:
            assert_same_bits(placed.own, arrays)


def test_a_device_derives_any_number_of_segments() -> None:
    one_row = replace(CONFIG, microbatch_rows=1, length_buckets=())
    ends_between = pack_for(one_row, drawn(np.random.default_rng(0), 36, 1))
    for microbatch in (*short_rollouts().microbatches, *ends_between.microbatches):
        assert_same_bits(on_devices(microbatch), microbatch.arrays())
    (microbatch,) = ends_between.microbatches
    (_rows, _numbers, room) = parts(microbatch.words, microbatch.length)[3].shape
    assert (microbatch.segments, room) == (37, 38), "the last slice of 4 would reach beyond the table"
