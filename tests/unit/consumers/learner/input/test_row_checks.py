"""One bad rollout costs only itself: it is left out by name, and its step trains as if it had not been there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import chosen_rows
from rollstream.consumers.learner.input.row_checks import unfit_rows
from rollstream.consumers.learner.objective import LossConfig, OptimizerConfig
from rollstream.consumers.learner.training.packing import pack_for, sequences_of
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models.config import DecoderConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import BatchTokenArray, NamedArray, TrainingBatch
from rollstream.topics.wire.media import media_arrays
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS
from tests.support.batches import random_batch

CONFIG = LearnerConfig(
    model=DecoderConfig(num_hidden_layers=1),
    microbatch_rows=4,
    sequence_length=32,
    optimizer=OptimizerConfig(name="sgd", beta1=0.0, learning_rate=1e-2, schedule="constant", max_grad_norm=0.0),
)
BATCH = random_batch(0)
ROW = 5


def last_token(value: float, name: str) -> Callable[[TrainingBatch], TrainingBatch]:
    """Return a change that gives another value to the last token of the row, which is trained on."""

    def changed(batch: TrainingBatch) -> TrainingBatch:
        array = getattr(batch, name).copy()
        array[batch.splits[ROW + 1] - 1] = value
        changes: dict[str, Any] = {name: array}
        return replace(batch, **changes)

    return changed


def temperature(value: float) -> Callable[[TrainingBatch], TrainingBatch]:
    return lambda batch: replace(batch, temperatures=np.where(np.arange(len(batch)) == ROW, value, 1.0))


def with_image(batch: TrainingBatch) -> TrainingBatch:
    [(name, array)] = media_arrays([("image/png", b"png")]).items()
    return replace(batch, token_arrays=(BatchTokenArray(name=name, array=array, rows=np.array([ROW], "<i4")),))


HOSTILE = {
    "image": ("media", with_image),
    "token beyond the vocabulary": ("vocabulary", last_token(99, "tokens")),
    "largest token": ("vocabulary", last_token(2**31 - 1, "tokens")),
    "negative token": ("vocabulary", last_token(-1, "tokens")),
    "temperature 1e-40": ("temperature", temperature(1e-40)),
    "temperature 1e-3": ("temperature", temperature(1e-3)),
    "temperature 1e300": ("temperature", temperature(1e300)),
    "negative temperature": ("temperature", temperature(-1.0)),
    "temperature NaN": ("temperature", temperature(np.nan)),
    "log-probability NaN": ("logprobs", last_token(np.nan, "logprobs")),
    "infinite log-probability": ("logprobs", last_token(-np.inf, "logprobs")),
    "advantage 1e6": ("advantage", last_token(1e6, "advantages")),
    "advantage -1e30": ("advantage", last_token(-1e30, "advantages")),
    "advantage NaN": ("advantage", last_token(np.nan, "advantages")),
}


def test_experts_of_another_model_are_left_out_and_a_dense_model_ignores_them() -> None:
    moe = DecoderConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    lengths = np.diff(BATCH.splits)

    def named(row: int, *shape: int, dtype: str = "|u1") -> BatchTokenArray:
        array = NamedArray.of(np.zeros((lengths[row], *shape), dtype))
        return BatchTokenArray(name=ROUTED_EXPERTS, array=array, rows=np.array([row], "<i4"))

    entries = (named(1, 2, 2), named(2, 4), named(3, 2, 3), named(4, 2, 2, dtype="<i4"), named(6, 2, 2, dtype="<u2"))
    batch = replace(BATCH, token_arrays=entries)
    [(skip, rows)] = unfit_rows(batch, replace(CONFIG, model=moe)).items()
    assert (skip.code, rows) == ("experts", (3, 4))
    assert unfit_rows(batch, replace(CONFIG, model=moe, routing_replay=False)) == {}
    assert unfit_rows(batch, CONFIG) == {}


@pytest.fixture(scope="module")
def train_step() -> TrainStep:
    return TrainStep(CONFIG)


def change(train_step: TrainStep, batch: TrainingBatch) -> np.ndarray:
    """Change of the parameters by a step on the rows that are not left out; with plain SGD, along the gradient."""
    left_out = {row for rows in unfit_rows(batch, CONFIG).values() for row in rows}
    fit = chosen_rows(batch, [row for row in range(len(batch)) if row not in left_out])
    before = jax.device_get(train_step.initial_state().params)
    state, metrics = train_step.train(train_step.initial_state(), pack_for(CONFIG, sequences_of(fit)))
    assert metrics["optim/skipped"] == 0.0
    after = jax.device_get(state.params)
    return np.concatenate([(after[name] - before[name]).ravel() for name in sorted(before)])


@pytest.fixture(scope="module")
def honest(train_step: TrainStep) -> np.ndarray:
    """The change of the parameters by a step on the other rows alone."""
    return change(train_step, chosen_rows(BATCH, [row for row in range(len(BATCH)) if row != ROW]))


@pytest.mark.parametrize(("code", "harm"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_bad_row_is_left_out_by_name_and_the_step_is_that_of_the_others_to_the_bit(
    train_step: TrainStep, honest: np.ndarray, code: str, harm: Callable[[TrainingBatch], TrainingBatch]
) -> None:
    ((reason, rows),) = unfit_rows(harm(BATCH), CONFIG).items()
    assert reason.code == code
    assert rows == (ROW,)
    np.testing.assert_array_equal(change(train_step, harm(BATCH)), honest)


def test_whatever_is_within_the_bounds_is_trained_on_and_turns_no_step_into_nan(train_step: TrainStep) -> None:
    extreme = BATCH
    for harm in (temperature(0.01), last_token(99.9, "advantages"), last_token(-1e30, "logprobs")):
        extreme = harm(extreme)
    assert unfit_rows(extreme, CONFIG) == {}
    assert np.isfinite(change(train_step, extreme)).all()


def test_one_hostile_reward_no_longer_turns_the_step(train_step: TrainStep, honest: np.ndarray) -> None:
    """Under rloo a reward of 1e6 spoils the advantages of its whole group: 1e6 and -3e5 for the other three."""
    advantages = BATCH.advantages.copy()
    for row, value in ((4, -3e5), (5, 1e6), (6, -3e5), (7, -3e5)):
        advantages[BATCH.splits[row] : BATCH.splits[row + 1]] = value
    actual = change(train_step, replace(BATCH, advantages=advantages))
    assert np.dot(actual, honest) / np.linalg.norm(actual) / np.linalg.norm(honest) > 0.8


def test_sound_rows_raw_and_greedy_ones_too_are_all_trained_on() -> None:
    raw = replace(BATCH, temperatures=np.full(len(BATCH), 1e-40), logprobs_processed=np.zeros(len(BATCH), bool))
    greedy = replace(BATCH, temperatures=np.zeros(len(BATCH)))
    scalar = replace(BATCH, advantages=np.ones(len(BATCH), "<f4"))
    for batch in (BATCH, raw, greedy, scalar):
        assert unfit_rows(batch, CONFIG) == {}


def test_what_is_not_trained_may_be_anything() -> None:
    masked = replace(BATCH, loss_mask=np.zeros(len(BATCH.tokens), bool))
    assert unfit_rows(last_token(np.nan, "logprobs")(last_token(np.inf, "advantages")(masked)), CONFIG) == {}


def test_rows_without_a_reference_are_left_out_where_it_must_be_carried() -> None:
    carried = replace(CONFIG, reference="carried")
    ((reason, rows),) = unfit_rows(BATCH, carried).items()
    assert "learner.reference" in reason.reason
    assert rows == tuple(range(len(BATCH)))
    with_reference = replace(BATCH, reference_logprobs=np.zeros(len(BATCH.tokens), "<f4"))
    assert unfit_rows(with_reference, carried) == {}
    group = np.repeat(np.arange(len(BATCH)) // 4 == 1, np.diff(BATCH.splits))
    lacking = replace(BATCH, reference_logprobs=np.where(group, np.nan, 0).astype("<f4"))
    assert list(unfit_rows(lacking, carried).values()) == [(4, 5, 6, 7)]
    others = chosen_rows(lacking, [row for row in range(len(BATCH)) if not 4 <= row < 8])
    assert pack_for(carried, sequences_of(others)).trained_sequences == len(BATCH) - 4
    ((_, rows),) = unfit_rows(last_token(np.inf, "reference_logprobs")(with_reference), carried).items()
    assert rows == (ROW,)


def test_rows_too_long_for_a_row_are_left_out_unless_they_are_cut() -> None:
    lengths = np.diff(BATCH.splits)
    short = replace(CONFIG, sequence_length=int(lengths.max()) - 1)
    longest = tuple(np.flatnonzero(lengths == lengths.max()).tolist())
    for too_long in ("refuse", "skip"):
        assert list(unfit_rows(BATCH, replace(short, too_long=too_long)).values()) == [longest]
    for too_long in ("truncate", "error"):
        assert unfit_rows(BATCH, replace(short, too_long=too_long)) == {}


@pytest.mark.parametrize("limit", [0.0, -1.0, 1e5, float("nan"), float("inf")])
def test_a_limit_on_advantages_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(ConfigurationError, match="advantage_limit"):
        replace(CONFIG, advantage_limit=limit)


PAIRS = replace(
    BATCH,
    groups=BATCH.groups * len(BATCH),
    group_index=np.arange(len(BATCH), dtype="<i4") // 2,
    advantages=np.repeat(np.where(np.arange(len(BATCH)) % 2, -1.0, 1.0), np.diff(BATCH.splits)).astype("<f4"),
)
IN_PAIRS = replace(CONFIG, reference="initial", loss=LossConfig(name="dpo"))


def test_the_other_of_a_pair_is_left_out_with_a_bad_row() -> None:
    reasons = {reason.code: rows for reason, rows in unfit_rows(last_token(99, "tokens")(PAIRS), IN_PAIRS).items()}
    assert reasons == {"vocabulary": (ROW,), "unpaired": (ROW - 1,)}
    mask = PAIRS.loss_mask.copy()
    mask[PAIRS.splits[ROW] : PAIRS.splits[ROW + 1]] = False
    reasons = {reason.code: rows for reason, rows in unfit_rows(replace(PAIRS, loss_mask=mask), IN_PAIRS).items()}
    assert reasons == {"unpaired": (ROW - 1, ROW)}


def test_a_pair_too_long_for_a_row_is_left_out_and_the_rest_is_packed() -> None:
    lengths = np.diff(PAIRS.splits).reshape(-1, 2).sum(axis=1)
    config = replace(IN_PAIRS, sequence_length=int(lengths.max()) - 1)
    unfit = unfit_rows(PAIRS, config)
    assert {reason.code for reason in unfit} == {"too_long"}
    rows = {row for rows in unfit.values() for row in rows}
    assert rows == {row for row in range(len(PAIRS)) if lengths[row // 2] == lengths.max()}
    fit = [row for row in range(len(PAIRS)) if row not in rows]
    packed = pack_for(config, sequences_of(chosen_rows(PAIRS, fit)), numbers=fit, rollouts=len(PAIRS))
    assert packed.trained_sequences == len(fit)


def test_batches_of_another_maker_are_refused_where_pairs_are_needed() -> None:
    with pytest.raises(ConfigurationError, match=r'grouping\.maker to "pairs"'):
        unfit_rows(replace(PAIRS, group_index=np.zeros(len(PAIRS), "<i4") + np.arange(len(PAIRS)) // 3), IN_PAIRS)
    with pytest.raises(ConfigurationError, match=r'grouping\.maker to "pairs"'):
        pack_for(IN_PAIRS, sequences_of(BATCH))
