"""The optimizer step: the same inputs give the same bits, and the recipe's schedule is kept."""

import jax
import numpy as np
import pytest

from consumers.learner.config import LearnerConfig, WarmStartConfig
from consumers.learner.objective import OptimizerConfig
from consumers.learner.optimizer import make_schedule
from consumers.learner.packing import TrainingSequence, pack, sequences_of
from consumers.learner.step import TrainState, TrainStep
from consumers.models.config import DecoderConfig
from consumers.weights.layout import params_digest
from tests.batches import random_batch

CONFIG = LearnerConfig(
    model=DecoderConfig(num_hidden_layers=1),
    microbatch_rows=4,
    sequence_length=32,
    max_steps=50,
    warm_start=WarmStartConfig(steps=30, sequences_per_step=16, learning_rate=1e-2),
)


@pytest.fixture(scope="module")
def train_step() -> TrainStep:
    return TrainStep(CONFIG)


def packed(number: int, rows: int = 32):
    return pack(sequences_of(random_batch(number, rows=64))[:rows], rows=4, sequence_length=32)


def digest(state: TrainState) -> str:
    return params_digest(jax.device_get(state.params))


def test_the_same_steps_from_the_same_state_give_the_same_bits(train_step: TrainStep) -> None:
    runs = []
    for _ in range(2):
        state, digests = train_step.initial_state(), []
        for number in range(3):
            state, _ = train_step.train(state, packed(number))
            digests.append(digest(state))
        runs.append(digests)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_a_step_counts_and_reports_finite_metrics(train_step: TrainStep) -> None:
    state, metrics = train_step.train(train_step.initial_state(), packed(0))
    assert int(state.step) == 1
    assert metrics["optim/lr"] == pytest.approx(2e-3)
    assert {"loss", "entropy/mean", "mismatch_kl/mean", "clip_ratio/low_mean", "optim/grad_norm"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_step_without_a_trained_token_leaves_the_parameters_as_they_are(train_step: TrainStep) -> None:
    before = digest(train_step.initial_state())
    state, metrics = train_step.train(train_step.initial_state(), packed(0, rows=0))
    assert digest(state) == before
    assert metrics["optim/grad_norm"] == 0.0


def test_the_warm_up_changes_nothing_and_nothing_compiles_after_it(train_step: TrainStep) -> None:
    state = train_step.initial_state()
    before = digest(state)
    train_step.warm_up(state)
    assert digest(state) == before
    compiled = train_step.compilations
    for rows in (32, 1, 8, 64, 5):
        state, _ = train_step.train(state, packed(1, rows=rows))
    assert train_step.compilations == compiled


def test_the_learning_rate_falls_by_cosine_to_the_final_one_and_stays() -> None:
    schedule = make_schedule(OptimizerConfig(learning_rate=2e-3, final_learning_rate=4e-4), 600)
    assert float(schedule(0)) == pytest.approx(2e-3)
    assert float(schedule(300)) == pytest.approx(1.2e-3)
    assert float(schedule(600)) == pytest.approx(4e-4)
    assert float(schedule(900)) == pytest.approx(4e-4)


def test_the_warm_start_teaches_its_examples_and_starts_the_optimizer_afresh(train_step: TrainStep) -> None:
    tokens = np.array([5, 6, 7, 8, 9], np.int32)
    nothing = np.zeros(5, np.float32)
    example = TrainingSequence(
        tokens=tokens, loss_mask=np.arange(5) > 1, advantages=nothing, generator_log_probs=nothing
    )
    state, metrics = train_step.warm_start(train_step.initial_state(), [example])
    assert metrics["warm_start/loss"] < 0.1 < np.log(CONFIG.model.vocab_size)
    assert int(state.step) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.optimizer))


def test_no_warm_start_without_examples(train_step: TrainStep) -> None:
    state, metrics = train_step.warm_start(train_step.initial_state(), [])
    assert metrics == {}
    assert digest(state) == digest(train_step.initial_state())
