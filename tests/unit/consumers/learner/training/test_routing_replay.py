"""Routing replay: the learner computes each token with the experts by which the engine sampled it."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.training import loss
from rollstream.consumers.learner.training.packing import PackedBatch, TrainingSequence, pack_for
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models import decoder
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig
from rollstream.consumers.models.slots import Row, SlotDecoder

MODEL = DecoderConfig(
    num_hidden_layers=3, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
)
LENGTH, ROWS = 64, 8
CONFIG = LearnerConfig(
    model=MODEL, sequence_length=LENGTH, microbatch_rows=ROWS, compute_dtype="bfloat16", layers="unrolled"
)
PROMPTS = (1, 3, 5, 7, 9, 11, 20, 30)


class Sampled(NamedTuple):
    params: dict[str, jax.Array]
    """Parameters in bfloat16."""
    sequences: list[TrainingSequence]


@pytest.fixture(scope="module")
def sampled() -> Sampled:
    """Rollouts of our engine in bfloat16, each with its experts."""
    made = jax.jit(decoder.init, static_argnums=1)(jax.random.key(3), MODEL)
    slots = SlotDecoder(MODEL, slots=len(PROMPTS), max_model_len=LENGTH, steps=8, dtype="bfloat16")
    params = slots.place({**made, decoder.EMBEDDING: made[decoder.EMBEDDING] * 6})
    draw = np.random.default_rng(0)
    rows = [Row(prompt=draw.integers(3, 90, size).tolist(), seed=size, max_tokens=30) for size in PROMPTS]
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
    experts: dict[int, NDArray[Any]] = {}
    numbers = {slot: number for number, slot in enumerate(slots.start(params, rows))}
    while len(experts) < len(rows):
        for new in slots.decode(params):
            number = numbers[new.slot]
            answers[number][0].extend(new.tokens)
            answers[number][1].extend(new.logprobs)
            if new.finish_reason:
                computed = PROMPTS[number] + len(answers[number][0]) - 1
                named = slots.routed_experts(new.slot, computed)
                assert named is not None
                experts[number] = np.concatenate([named, np.full_like(named[:1], 255)])
    return Sampled(
        dict(params),
        [
            TrainingSequence(
                tokens=np.array([*row.prompt, *tokens], np.int32),
                loss_mask=np.arange(len(row.prompt) + len(tokens)) >= len(row.prompt),
                advantages=np.array([1.0 if number % 2 else -1.0], np.float32),
                generator_log_probs=np.array([*[0.0] * len(row.prompt), *logprobs], np.float32),
                routed_experts=experts[number],
            )
            for number, (row, (tokens, logprobs)) in enumerate(zip(rows, answers, strict=True))
        ],
    )


def packed(sequences: list[TrainingSequence], config: LearnerConfig = CONFIG) -> PackedBatch:
    (batch,) = pack_for(config, sequences).microbatches
    return batch


log_probs = jax.jit(
    partial(loss.log_probs, model=MODEL, compute=ComputeSettings(dtype="bfloat16")), static_argnames="compute"
)


def differences(sampled: Sampled, sequences: list[TrainingSequence], config: LearnerConfig = CONFIG) -> NDArray[Any]:
    """Log-probabilities of sampled tokens by the learner minus those by the engine."""
    arrays = packed(sequences, config).arrays()
    trained = arrays["loss_mask"] > 0
    difference = np.asarray(log_probs(sampled.params, batch=arrays)) - arrays["generator_log_probs"]
    return np.asarray(difference[trained], np.float64)


def k3(differences: NDArray[Any]) -> float:
    return float(np.mean(np.exp(differences) - 1 - differences))


def without(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    return [sequence._replace(routed_experts=None) for sequence in sequences]


def test_with_replay_the_mismatch_in_bfloat16_falls_to_rounding_and_a_shift_by_one_token_shows(
    sampled: Sampled,
) -> None:
    replayed = differences(sampled, sampled.sequences)
    live = differences(sampled, without(sampled.sequences))
    shifted = differences(
        sampled, [s._replace(routed_experts=np.roll(s.routed_experts, 1, axis=0)) for s in sampled.sequences]
    )
    # bfloat16 has 8 bits: a logit of about 4 is rounded to a 64th.
    assert np.abs(replayed).max() < 1 / 32
    assert np.abs(live).max() > 10 * np.abs(replayed).max()
    assert k3(live) > 30 * k3(replayed)
    assert k3(shifted) > 1000 * k3(replayed)


def test_rollouts_without_experts_train_as_without_replay_also_beside_others(sampled: Sampled) -> None:
    off = replace(CONFIG, routing_replay=False)
    assert "routed_experts" not in packed(sampled.sequences, off).arrays()
    live = differences(sampled, sampled.sequences, off)
    np.testing.assert_array_equal(differences(sampled, without(sampled.sequences)), live)
    mixture = [*without(sampled.sequences[:4]), *sampled.sequences[4:]]
    trained = {True: packed(mixture).arrays(), False: packed(sampled.sequences).arrays()}
    np.testing.assert_array_equal(trained[True]["tokens"], trained[False]["tokens"])
    beside = np.asarray(log_probs(sampled.params, batch=trained[True]))
    replayed = np.asarray(log_probs(sampled.params, batch=trained[False]))
    named = (trained[True]["routed_experts"] != 255).any(axis=(2, 3))
    tokens = trained[True]["loss_mask"] > 0
    same = beside == replayed
    assert same[tokens & named].mean() > 0.9
    assert not same[tokens & ~named].all()


def test_the_router_weighs_the_forced_experts_and_learns_from_them() -> None:
    draw = np.random.default_rng(1)
    tokens, router = (draw.normal(size=shape).astype(np.float32) for shape in ((6, 16), (8, 16)))
    forced = np.array([[3, 1], [0, 7], [255, 255], [5, 255], [2, 4], [6, 3]], np.uint8)
    weights, chosen = jax.jit(decoder.routed, static_argnums=2)(tokens, router, MODEL, forced)
    _live, others = jax.jit(decoder.routed, static_argnums=2)(tokens, router, MODEL)
    known = [0, 1, 4, 5]
    np.testing.assert_array_equal(chosen[np.array(known)], forced[known])
    # A row with an unknown expert is routed anew as a whole.
    np.testing.assert_array_equal(chosen[2:4], others[2:4])
    scores = np.exp(tokens.astype(np.float64) @ router.T)
    picked = np.take_along_axis(scores, np.asarray(chosen, np.int64), axis=1)
    np.testing.assert_allclose(weights, picked / picked.sum(axis=1, keepdims=True), rtol=1e-5)
    gradient = jax.grad(lambda r: decoder.routed(tokens, r, MODEL, forced)[0][:, 0].sum())(router)
    assert np.abs(np.asarray(gradient)).max(axis=1).min() > 0


def test_scanned_layers_take_the_same_experts(sampled: Sampled) -> None:
    arrays = packed(sampled.sequences).arrays()
    scanned = ComputeSettings(dtype="bfloat16", scanned=True)
    whole, other = (
        np.asarray(log_probs(sampled.params, batch=arrays, compute=compute))
        for compute in (ComputeSettings(dtype="bfloat16"), scanned)
    )
    tokens = arrays["loss_mask"] > 0
    np.testing.assert_allclose(whole[tokens], other[tokens], atol=1 / 32)


def test_a_step_trains_with_the_experts_of_its_rollouts_and_compiles_nothing_new(sampled: Sampled) -> None:
    step = TrainStep(CONFIG)
    params = {name: np.asarray(value, np.float32) for name, value in sampled.params.items()}
    step.warm_up(step.fresh_state(params))
    compiled = step.compilations
    mismatch = {}
    for name, sequences in (("replayed", sampled.sequences), ("live", without(sampled.sequences))):
        _state, metrics = step.train(step.fresh_state(params), pack_for(CONFIG, sequences))
        mismatch[name] = metrics["mismatch_kl/mean"]
    assert step.compilations == compiled
    assert mismatch["live"] > 30 * mismatch["replayed"] > 0
