"""Sampling masks: the learner's distribution of a token is over the tokens among which the engine drew it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.training import loss
from rollstream.consumers.learner.training.packing import KEPT_TOKENS, PackedBatch, TrainingSequence, pack_for
from rollstream.consumers.models import decoder
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig
from rollstream.consumers.models.slots import Row, RowTokens, SlotDecoder

MODEL = DecoderConfig(num_hidden_layers=1)
LENGTH = 64
CONFIG = LearnerConfig(model=MODEL, sequence_length=LENGTH, microbatch_rows=2)
FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_p": 0.9, "top_k": 7, "temperature": 0.7},
    {},
    {"top_p": 0.5, "temperature": 0.0},
]


class Sampled(NamedTuple):
    params: dict[str, jax.Array]
    rows: list[Row]
    answers: list[RowTokens]
    sequences: list[TrainingSequence]


@pytest.fixture(scope="module")
def sampled() -> Sampled:
    """Rows of our engine in float32 with filters, without one, and greedy."""
    made = jax.jit(decoder.init, static_argnums=1)(jax.random.key(3), MODEL)
    params = {**made, decoder.EMBEDDING: made[decoder.EMBEDDING] * 6}
    slots = SlotDecoder(MODEL, slots=8, max_model_len=16, steps=4)
    rows = [Row(prompt=[5, 6, 7 + i], seed=i, max_tokens=12, **filters) for i, filters in enumerate(FILTERS)]
    answers = slots.sample(slots.place(params), rows)
    sequences = []
    for row, answer in zip(rows, answers, strict=True):
        start, size = len(row.prompt), len(row.prompt) + len(answer.tokens)
        counts = np.zeros(size, np.int32)
        counts[start : start + len(answer.kept)] = [len(kept) for kept in answer.kept]
        sequences.append(
            TrainingSequence(
                tokens=np.array([*row.prompt, *answer.tokens], np.int32),
                loss_mask=np.arange(size) >= start,
                advantages=np.array([1.0], np.float32),
                generator_log_probs=np.array([*[0.0] * start, *answer.logprobs], np.float32),
                temperature=row.temperature or 1.0,
                kept_counts=counts if answer.kept else None,
                kept_tokens=np.array([token for kept in answer.kept for token in kept], np.int32),
            )
        )
    return Sampled(params, rows, answers, sequences)


def packed(sequences: list[TrainingSequence]) -> PackedBatch:
    (batch,) = pack_for(CONFIG, sequences).microbatches
    return batch


log_probs = jax.jit(partial(loss.log_probs, model=MODEL, compute=ComputeSettings()))
logits_of = jax.jit(decoder.logits, static_argnums=1)


def test_each_token_is_among_the_kept_ones_which_are_as_many_as_its_filter_allows(sampled: Sampled) -> None:
    for row, answer in zip(sampled.rows, sampled.answers, strict=True):
        assert len(answer.kept) == (len(answer.tokens) if row.temperature and row != sampled.rows[4] else 0)
        for token, kept in zip(answer.tokens, answer.kept, strict=False):
            assert token in kept
            assert len(set(kept)) == len(kept) < MODEL.vocab_size
            assert not row.top_k or len(kept) <= row.top_k
    assert {len(kept) for kept in sampled.answers[1].kept} == {5}


def test_with_masks_the_ratio_at_the_same_weights_is_1_and_without_it_is_not(sampled: Sampled) -> None:
    arrays = packed(sampled.sequences).arrays()
    trained = arrays["loss_mask"] > 0
    ratios = np.exp(np.asarray(log_probs(sampled.params, batch=arrays)) - arrays["generator_log_probs"])
    np.testing.assert_allclose(ratios[trained], 1.0, atol=1e-4)
    whole = {name: array for name, array in arrays.items() if not name.startswith("kept_")}
    biased = np.exp(np.asarray(log_probs(sampled.params, batch=whole)) - arrays["generator_log_probs"])
    filtered = trained & np.isin(arrays["tokens"], range(MODEL.vocab_size))
    assert np.mean(biased[filtered]) < 0.9
    # Only rows with a filter have other values; they can only be below.
    assert biased[trained].max() < 1.0001


def direct(params: dict[str, jax.Array], arrays: dict[str, NDArray[Any]], removed: NDArray[np.bool_]) -> jax.Array:
    """Log-probabilities of all tokens but the first of each row, by the softmax of the kept logits."""
    logits = decoder.logits(params, MODEL, arrays["tokens"], arrays["positions"], arrays["segment_ids"])[:, :-1]
    logits = jnp.where(removed, -jnp.inf, logits / arrays["temperatures"][:, 1:, None])
    chosen = jnp.take_along_axis(logits, arrays["tokens"][:, 1:, None], axis=-1)[..., 0]
    return chosen - jax.scipy.special.logsumexp(logits, axis=-1)


@pytest.mark.parametrize("chunk", [0, 40])
def test_log_probabilities_entropies_and_gradients_equal_a_direct_computation(sampled: Sampled, chunk: int) -> None:
    arrays = packed(sampled.sequences).arrays()
    removed = np.zeros((2, LENGTH - 1, MODEL.vocab_size), bool)
    begins = {tuple(s.tokens[:3].tolist()): s for s in sampled.sequences}
    for row, at in zip(*np.nonzero((arrays["positions"] == 0) & (arrays["segment_ids"] > 0)), strict=True):
        sequence = begins[tuple(arrays["tokens"][row, at : at + 3].tolist())]
        if sequence.kept_counts is not None and sequence.kept_tokens is not None:
            ends = np.cumsum(sequence.kept_counts)
            for place in np.flatnonzero(sequence.kept_counts):
                removed[row, at + place - 1] = True
                removed[
                    row, at + place - 1, sequence.kept_tokens[ends[place] - sequence.kept_counts[place] : ends[place]]
                ] = False
    weights = np.random.default_rng(0).normal(size=removed.shape[:2]) * arrays["loss_mask"][:, 1:]
    compute = ComputeSettings(vocabulary_chunk=chunk)

    def by_loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(weights * loss.log_probs(params, model=MODEL, compute=compute, batch=arrays)[:, 1:])

    def by_hand(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(weights * jnp.where(weights != 0, direct(params, arrays, removed), 0.0))

    actual, expected = (jax.jit(jax.value_and_grad(each))(sampled.params) for each in (by_loss, by_hand))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), actual, expected)


def test_a_cut_sequence_keeps_the_masks_of_its_tokens_and_others_need_no_room(sampled: Sampled) -> None:
    assert KEPT_TOKENS not in packed([s for s in sampled.sequences if s.kept_counts is None]).arrays()
    config = LearnerConfig(model=MODEL, sequence_length=8, microbatch_rows=2, too_long="truncate")
    (cut,) = pack_for(config, sampled.sequences[1:2]).microbatches
    arrays = cut.arrays()
    inside = arrays["kept_positions"] < 8
    assert arrays["kept_positions"][inside].tolist() == [at for at in range(3, 8) for _ in range(5)]
    assert arrays[KEPT_TOKENS][inside].tolist() == [t for kept in sampled.answers[1].kept[:5] for t in kept]
