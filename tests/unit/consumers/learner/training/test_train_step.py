"""The optimizer step: the same inputs give the same bits, and the recipe's schedule is kept."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig, WarmStartConfig
from rollstream.consumers.learner.objective import LossConfig, OptimizerConfig
from rollstream.consumers.learner.startup import begin, load_teacher, supervised
from rollstream.consumers.learner.training import train_step as step_module
from rollstream.consumers.learner.training.optimizer import make_schedule
from rollstream.consumers.learner.training.packing import TrainingSequence, pack, pack_for, sequences_of
from rollstream.consumers.learner.training.train_step import TrainState, TrainStep
from rollstream.consumers.models import decoder, huggingface
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.tokenizer import PRINTABLE_ASCII, CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import write_character_tokenizer
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.params_digest import params_digest
from tests.support.batches import random_batch
from tests.support.checkpoints import random_parameters

CONFIG = LearnerConfig(
    model=DecoderConfig(num_hidden_layers=1),
    microbatch_rows=4,
    sequence_length=32,
    max_steps=50,
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="constant"),
    warm_start=WarmStartConfig(steps=30, sequences_per_step=16, learning_rate=1e-2),
)


# Recomputed activations change only the rounding.
SEVERAL = replace(CONFIG, minibatches=2, epochs=2, remat=True)
EVERYTHING = replace(
    CONFIG,
    minibatches=2,
    epochs=2,
    optimizer=OptimizerConfig(learning_rate=2e-2, schedule="linear"),
    length_buckets=(16,),
    loss=LossConfig(importance_sampling="truncated", kl_coefficient=0.1),
    reference="initial",
)


@pytest.fixture(scope="module")
def train_step() -> TrainStep:
    return TrainStep(CONFIG)


@pytest.fixture(scope="module")
def everything() -> TrainStep:
    step = TrainStep(EVERYTHING)
    step.warm_up(step.initial_state())
    return step


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


def test_the_arrays_of_a_state_are_read_beside_a_step_until_its_first_update(everything: TrainStep) -> None:
    """The parameters after a step can be copied while the gradients of the next one are computed."""
    before = everything.initial_state()
    expected, read = digest(before), list[str]()
    after, _ = everything.train(
        before,
        pack_for(EVERYTHING, rollouts(0)),
        everything.frozen(before.params),
        before_update=lambda: read.append(digest(before)),
    )
    assert read == [expected], "once, although a step has several updates"
    assert all(leaf.is_deleted() for leaf in before.params.values()), "the updates reused its buffers"
    assert digest(after) != expected


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


@pytest.mark.long
def test_the_warm_start_teaches_its_examples_and_starts_the_optimizer_afresh(
    train_step: TrainStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.array([5, 6, 7, 8, 9], np.int32)
    nothing = np.zeros(5, np.float32)
    example = TrainingSequence(
        tokens=tokens, loss_mask=np.arange(5) > 1, advantages=nothing, generator_log_probs=nothing
    )
    heard: list[tuple[int, int, float]] = []
    monkeypatch.setattr(step_module, "REPORT_EVERY_S", 0.0)
    state, metrics = train_step.warm_start(train_step.initial_state(), [example], lambda *report: heard.append(report))
    assert [(done, total) for done, total, _loss in heard] == [(done, 30) for done in range(1, 31)]
    assert heard[0][2] > heard[-1][2] == metrics["warm_start/loss"]
    assert metrics["warm_start/loss"] < 0.1 < np.log(CONFIG.model.vocab_size)
    assert int(state.step) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.optimizer))


def test_no_warm_start_without_examples(train_step: TrainStep) -> None:
    state, metrics = train_step.warm_start(train_step.initial_state(), [])
    assert metrics == {}
    assert digest(state) == digest(train_step.initial_state())


@pytest.mark.parametrize(
    ("too_long", "lengths", "trained", "says"),
    [
        (
            "refuse",
            (160, 20),
            range(1, 160),
            "1 of 2 examples of the warm start are longer than .* the longest has 160",
        ),
        ("error", (160, 160), range(1, 160), "2 of 2 examples"),
        ("skip", (160, 160), range(1, 160), "no token to train on: 2 of 2 examples"),
        ("truncate", (160, 160), range(32, 160), "no token to train on"),
        ("refuse", (20, 20), range(1), "no token to train on"),
    ],
)
def test_a_warm_start_that_teaches_nothing_is_refused(
    too_long: str, lengths: tuple[int, ...], trained: range, says: str
) -> None:
    examples = [(np.ones(length, np.int32), np.isin(np.arange(length), trained)) for length in lengths]
    with pytest.raises(ConfigurationError, match=says):
        begin(TrainStep(replace(CONFIG, too_long=too_long)), examples)


def rollouts(number: int, count: int = 32) -> list[TrainingSequence]:
    return sequences_of(random_batch(number, rows=64))[:count]


def largest_difference(one: TrainState, other: TrainState) -> float:
    return max(float(abs(one.params[name] - value).max()) for name, value in other.params.items())


def test_a_step_of_minibatches_and_epochs_is_that_many_updates_in_turn(train_step: TrainStep) -> None:
    several = TrainStep(SEVERAL)
    state, metrics = several.train(several.initial_state(), pack_for(SEVERAL, rollouts(0)))
    expected, losses = train_step.initial_state(), []
    for _epoch in range(2):
        for half in (rollouts(0)[:16], rollouts(0)[16:]):
            expected, actual = train_step.train(expected, pack_for(CONFIG, half))
            losses.append(actual["loss"])
    # Four updates of Adam move parameters by up to 8e-3.
    assert largest_difference(expected, train_step.initial_state()) > 5e-3
    assert largest_difference(state, expected) < 1e-4
    assert (int(state.step), int(expected.step)) == (1, 4)
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-4)


def test_nothing_compiles_after_the_warm_up_whatever_a_step_is_made_of(
    everything: TrainStep, caplog: pytest.LogCaptureFixture
) -> None:
    state = everything.initial_state()
    reference = everything.frozen(state.params)
    state, _ = everything.train(state, pack_for(EVERYTHING, rollouts(0)), reference)
    compiled = everything.compilations
    masked = [sequence._replace(loss_mask=np.zeros_like(sequence.loss_mask)) for sequence in rollouts(1)]
    with jax.log_compiles():
        for sequences in (rollouts(0, 64), rollouts(1, 1), [], masked, rollouts(2)):
            packed = pack_for(EVERYTHING, sequences)
            state, metrics = everything.train(state, everything.place(packed), reference)
            assert all(np.isfinite(value) for value in metrics.values())
    assert everything.compilations == compiled
    assert [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()] == []


def test_buckets_minibatches_and_the_rate_of_the_last_update_are_reported(everything: TrainStep) -> None:
    state = everything.initial_state()
    packed = pack_for(EVERYTHING, rollouts(0, 64))
    assert {batch.tokens.shape for batch in packed.microbatches} <= {(4, 32), (8, 16)}
    state, metrics = everything.train(state, packed, everything.frozen(everything.initial_state().params))
    assert int(state.optimizer.made) == 4
    rate = make_schedule(EVERYTHING.optimizer, 4 * EVERYTHING.max_steps)(3)
    assert metrics["optim/lr"] == pytest.approx(float(rate))
    assert metrics["packing/microbatches"] == len(packed.microbatches)
    assert metrics["packing/padding_fraction"] == pytest.approx(packed.padding_fraction)
    assert metrics["packing/too_long"] == packed.too_long


def test_several_updates_of_a_step_are_measured_against_the_policy_before_it(
    everything: TrainStep, train_step: TrainStep
) -> None:
    state = everything.initial_state()
    _, metrics = everything.train(state, pack_for(EVERYTHING, rollouts(0)), everything.frozen(state.params))
    # The metric compares the generator with the learner before the step; after three updates at this learning rate, the
    # learner would differ by far more.
    before = [
        train_step.train(train_step.initial_state(), pack_for(CONFIG, half))[1]["mismatch_kl/mean"]
        for half in (rollouts(0)[:16], rollouts(0)[16:])
    ]
    assert metrics["mismatch_kl/mean"] == pytest.approx(np.mean(before), rel=1e-4)


def test_the_reference_is_what_it_is_given_whatever_the_learner_becomes(everything: TrainStep) -> None:
    state = everything.initial_state()
    reference = jax.tree.map(np.array, everything.frozen(state.params))
    distances = []
    for _ in range(2):
        state, metrics = everything.train(state, pack_for(EVERYTHING, rollouts(0)), everything.frozen(reference))
        distances.append(metrics["kl/mean"])
    assert 0 < distances[0] < distances[1]
    with pytest.raises(ValueError, match=r"learner.reference is 'initial'"):
        everything.train(state, pack_for(EVERYTHING, rollouts(0)))


@pytest.fixture(scope="module")
def teacher_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model of another shape, with the policy's tokens."""
    directory = tmp_path_factory.mktemp("teacher")
    model = DecoderConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    huggingface.save(directory, model, random_parameters(model))
    write_character_tokenizer(directory, CharacterTokenizer())
    return directory


def one_by_one(params: Mapping[str, jax.Array], model: DecoderConfig, sequences: Sequence[TrainingSequence]) -> NDArray:
    """Log-probabilities of the trained tokens, each sequence alone in a row."""
    tokens, real = np.zeros((2, len(sequences), 32), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)], real[row, : len(sequence.tokens)] = sequence.tokens, 1
    positions = np.broadcast_to(np.arange(32), tokens.shape)
    logits = jax.jit(decoder.logits, static_argnums=1)(params, model, tokens, positions, real)
    collected = []
    for row, sequence in enumerate(sequences):
        every = np.asarray(jax.nn.log_softmax(logits[row] / sequence.temperature))
        collected += [every[at - 1, sequence.tokens[at]] for at in np.flatnonzero(sequence.loss_mask) if at]
    return np.array(collected)


@pytest.mark.long
def test_a_teacher_of_another_shape_is_read_beside_the_policy(teacher_directory: Path) -> None:
    loss = LossConfig(reward_coefficient=0.0, distillation_coefficient=1.0, entropy_coefficient=0.0)
    config = replace(CONFIG, loss=loss, teacher=str(teacher_directory))
    step = TrainStep(config)
    teacher, state = load_teacher(step), step.initial_state()
    step.warm_up(state)
    compiled = step.compilations
    with pytest.raises(ValueError, match=r"learner\.teacher is"):
        step.train(state, pack_for(config, rollouts(0)))
    state, metrics = step.train(state, pack_for(config, rollouts(0)), None, teacher)
    assert step.compilations == compiled
    # The learner is taught the log-probabilities of the model in the directory, which are computed here without it.
    model = huggingface.load_config(teacher_directory)
    stored = {name: jax.numpy.asarray(value) for name, value in huggingface.load(teacher_directory).items()}
    mine = one_by_one(step.initial_state().params, config.model, rollouts(0))
    difference = mine - one_by_one(stored, model, rollouts(0))
    assert metrics["distillation/kl_mean"] == pytest.approx(float(difference.mean()), abs=1e-5)


def test_a_teacher_with_other_tokens_is_refused(teacher_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(teacher_directory, tmp_path, dirs_exist_ok=True)
    other = "".join(reversed(PRINTABLE_ASCII))
    write_character_tokenizer(tmp_path, CharacterTokenizer(other))
    with pytest.raises(ConfigurationError, match="another vocabulary than the policy"):
        load_teacher(TrainStep(replace(CONFIG, teacher=str(tmp_path))))


def test_the_warm_start_is_packed_as_reinforcement_learning_is_and_goes_before_it(
    train_step: TrainStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm start's loss on packed rows equals the mean over all answers' tokens, computed here one sequence at a
    time. The loss falls, and the steps after the warm start begin with its parameters."""
    draw = np.random.default_rng(2)
    examples = []
    for _ in range(24):
        length = int(draw.integers(4, 12))
        examples.append((np.sort(draw.integers(2, 12, length)).astype(np.int32), np.arange(length) > 1))
    losses: list[float] = []
    monkeypatch.setattr(step_module, "REPORT_EVERY_S", 0.0)
    first = train_step.initial_state().params
    taught, metrics = begin(train_step, examples, lambda _done, _of, loss: losses.append(loss))
    draws = np.random.Generator(np.random.Philox(key=CONFIG.seed))
    drawn = draws.integers(len(examples), size=CONFIG.warm_start.sequences_per_step)
    log_probs = one_by_one(first, CONFIG.model, supervised([examples[index] for index in drawn]))
    assert losses[0] == pytest.approx(-float(log_probs.mean()), rel=1e-5)
    assert losses[-1] == metrics["warm_start/loss"] < 0.5 * losses[0]
    begun = {name: np.array(value) for name, value in taught.params.items()}
    trained, _ = train_step.train(taught, packed(0))
    assert int(trained.step) == 1
    # One update of Adam moves a parameter by its rate; the warm start moved them further.
    assert max(float(abs(trained.params[name] - value).max()) for name, value in begun.items()) < 2.1e-3
    assert max(float(abs(first[name] - value).max()) for name, value in begun.items()) > 1e-2


def test_bfloat16_learns_and_keeps_float32_masters_and_compares_with_the_rollouts_own_reference() -> None:
    config = replace(CONFIG, compute_dtype="bfloat16", remat=True, reference="carried")
    carried = [item._replace(reference_log_probs=item.generator_log_probs) for item in rollouts(0)]
    step = TrainStep(config)
    state, collected = step.initial_state(), []
    for _ in range(3):
        state, metrics = step.train(state, pack_for(config, carried))
        collected.append(metrics)
    assert collected[-1]["loss"] < collected[0]["loss"]
    assert collected[0]["kl/mean"] > 0
    floats = [leaf for leaf in jax.tree.leaves(state) if np.issubdtype(leaf.dtype, np.floating)]
    assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}


def test_parameters_from_elsewhere_are_placed_as_float32_masters(train_step: TrainStep) -> None:
    given = {name: np.asarray(value, np.float16) for name, value in train_step.initial_state().params.items()}
    state = train_step.fresh_state(given)
    assert {leaf.dtype for leaf in state.params.values()} == {np.dtype(np.float32)}
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == train_step.shardings
