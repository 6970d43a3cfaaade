"""Every loss, correction, divergence and reduction against formulas written out in numpy and float64, token by token.

Gradients are compared with central differences of those formulas; what the papers hold constant stays constant.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import RECIPES, LossConfig, policy_metrics
from rollstream.consumers.learner.training.loss import policy_loss_of
from rollstream.consumers.learner.training.surrogates import SURROGATES
from rollstream.topics.errors import ConfigurationError
from tests.support.microbatches import Sample, denominators, microbatch, row_by_row

ROWS, LENGTH = 9, 16
NORM = 12.0


def some_samples(seed: int = 5, count: int = 10, spread: float = 0.5, per_token: bool = True) -> list[Sample]:
    """Rollouts whose policies differ from the learner's by `spread`, some in several turns; the third has no advantage,
    and no token of the fourth is trained."""
    draw = np.random.default_rng(seed)
    collected = []
    for index in range(count):
        length = int(draw.integers(2, 8))
        mask = draw.random(length) < 0.7
        mask[-1] = True
        mask[0] = False
        learner = -draw.gamma(2.0, 1.0, length)
        collected.append(
            Sample(
                mask=mask & (index != 3),
                advantages=draw.normal(size=length if per_token else 1).repeat(1 if per_token else length)
                * (index != 2),
                generator=learner + spread * draw.normal(size=length),
                learner=learner,
                entropy=draw.gamma(2.0, 0.5, length),
                proximal=learner + spread / 2 * draw.normal(size=length),
                reference=learner + spread * draw.normal(size=length),
                tokens=draw.integers(0, 50, length).astype(np.int32),
            )
        )
    return collected


PerToken = Callable[[float, float, float, float], float]
"""Function of (ratio, the same held constant, advantage, log-probability)."""


def ppo(low: float, high: float, cap: float = math.inf) -> PerToken:
    def loss(ratio: float, _constant: float, advantage: float, _logprob: float) -> float:
        gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        return -(max(gain, cap * advantage) if advantage < 0 else gain)

    return loss


def rloo(_ratio: float, _constant: float, advantage: float, logprob: float) -> float:
    return -advantage * logprob


def cross_entropy(_ratio: float, _constant: float, _advantage: float, logprob: float) -> float:
    return -logprob


def cispo(low: float, high: float) -> PerToken:
    def loss(_ratio: float, constant: float, advantage: float, logprob: float) -> float:
        return -min(max(constant, 1 - low), 1 + high) * advantage * logprob

    return loss


def sapo(positive: float, negative: float) -> PerToken:
    def loss(ratio: float, _constant: float, advantage: float, _logprob: float) -> float:
        temperature = positive if advantage > 0 else negative
        return -4 / temperature / (1 + math.exp(-temperature * (ratio - 1))) * advantage

    return loss


def reduced(config: LossConfig, per_sequence: list[list[float]]) -> float:
    """Reduce the token losses of the sequences that have any, as config.recipe.reduction says."""
    reduction = config.recipe.reduction
    if reduction == "token_mean":
        return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
    if reduction == "sequence_mean_token_mean":
        return sum(sum(losses) / len(losses) for losses in per_sequence) / len(per_sequence)
    return sum(sum(losses) / config.recipe.length_norm for losses in per_sequence) / len(per_sequence)


def weights(config: LossConfig, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Importance weights of one sequence's trained tokens, and which of them were limited."""
    mode, level = config.recipe.importance_sampling, config.recipe.importance_level
    if mode == "none":
        return np.ones(len(log_ratios)), np.zeros(len(log_ratios), bool)
    raw = {
        "token": np.exp(log_ratios),
        "sequence": np.full(len(log_ratios), np.prod(np.exp(log_ratios))),
        "geometric": np.full(len(log_ratios), np.prod(np.exp(log_ratios)) ** (1 / len(log_ratios))),
    }[level]
    if mode == "truncated":
        return np.minimum(raw, config.importance_high), raw > config.importance_high
    inside = (config.importance_low <= raw) & (raw <= config.importance_high)
    return raw * inside, ~inside


def expected(
    config: LossConfig,
    per_token: PerToken,
    samples: Sequence[Sample],
    *,
    held: Sequence[Sample] | None = None,
    recomputed: bool = True,
    level: str = "token",
) -> float:
    """The loss. `held` are the samples from which everything held constant is taken; `recomputed` adds proximal
    log-probabilities. With `level` "sequence", GSPO has one ratio for a sequence; with "sequence, token by token", it
    has that ratio's value, and each token's own change of the ratio."""
    per_sequence = []
    for sample, constant in zip(samples, held or samples, strict=True):
        at = np.flatnonzero(sample.mask)
        if not len(at):
            continue
        before = constant.proximal if recomputed else constant.learner
        against = before if config.recipe.importance_sampling != "none" else sample.generator
        ratios = np.exp((sample.learner - against)[at])
        fixed = np.exp((constant.learner - against)[at])
        if level == "sequence":
            ratios = np.full(len(at), np.prod(ratios) ** (1 / len(at)))
            fixed = np.full(len(at), np.prod(fixed) ** (1 / len(at)))
        elif level == "sequence, token by token":
            moved = np.exp((sample.learner - constant.learner)[at])
            ratios = np.prod(fixed) ** (1 / len(at)) * moved
        factors, _ = weights(config, (before - sample.generator)[at])
        if (
            config.sequence_mask_limit
            and (constant.generator - constant.learner)[at].mean() > config.sequence_mask_limit
        ):
            factors = factors * (sample.advantages[at] >= 0)
        losses = []
        for t, ratio, steady, factor in zip(at, ratios, fixed, factors, strict=True):
            loss = factor * per_token(ratio, steady, sample.advantages[t], sample.learner[t])
            loss -= config.recipe.entropy_coefficient * sample.entropy[t]
            log_r = sample.reference[t] - sample.learner[t]
            loss += (
                config.kl_coefficient
                * {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.exp(log_r) - 1 - log_r}[config.kl_estimator]
            )
            losses.append(loss)
        per_sequence.append(losses)
    return reduced(config, per_sequence)


def differences(
    config: LossConfig, per_token: PerToken, samples: list[Sample], *, recomputed: bool = True, level: str = "token"
) -> list[np.ndarray]:
    """Central differences of `expected` by every log-probability of the learner, [tokens] per sample."""
    h, collected = 1e-6, []
    for index, sample in enumerate(samples):
        gradient = np.zeros(len(sample.mask))
        for t in range(len(sample.mask)):
            ends = []
            for sign in (1, -1):
                moved = sample.learner.copy()
                moved[t] += sign * h
                changed = [*samples[:index], dataclasses.replace(sample, learner=moved), *samples[index + 1 :]]
                ends.append(expected(config, per_token, changed, held=samples, recomputed=recomputed, level=level))
            gradient[t] = (ends[0] - ends[1]) / (2 * h)
        collected.append(gradient)
    return collected


@partial(jax.jit, static_argnames="config")
def value_and_gradient(learner: jax.Array, entropy: jax.Array, config: LossConfig, batch: Any, ones: Any) -> Any:
    return jax.value_and_grad(policy_loss_of, has_aux=True)(learner, entropy, config, batch, ones)


def found(
    config: LossConfig,
    samples: list[Sample],
    layout: Sequence[Sequence[int]] | None = None,
    *,
    recomputed: bool = True,
    reference: bool = True,
    rubbish: float = 0.0,
) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """Loss, metrics, and gradient by the learner's log-probabilities, computed by our code in float64."""
    layout = row_by_row(samples, LENGTH) if layout is None else layout
    layout = [*layout, *[[]] * (ROWS - len(layout))]
    batch = microbatch(samples, layout, LENGTH, config, rubbish=rubbish, dtype=np.float64)
    if not recomputed:
        del batch["proximal_log_probs"]
    if not reference:
        del batch["reference_log_probs"]
    learner, entropy = batch.pop("learner")[:, 1:], batch.pop("entropy")[:, 1:]
    if not math.isfinite(rubbish):
        # The model's own values are finite everywhere; recorded values may be anything.
        learner, entropy = (np.nan_to_num(array, nan=-3.0, posinf=-3.0, neginf=-3.0) for array in (learner, entropy))
    with jax.enable_x64(True):
        (loss, metrics), gradient = value_and_gradient(
            learner, entropy, config, batch, denominators(samples, np.float64)
        )
        gradient = np.asarray(gradient)
    by_sample = [np.zeros(len(sample.mask)) for sample in samples]
    for row, members in enumerate(layout):
        start = 0
        for index in members:
            for t in range(max(1, 1 - start), len(samples[index].mask)):
                by_sample[index][t] = gradient[row, start + t - 1]
            start += len(samples[index].mask)
    of_samples = sum(float(np.abs(part).sum()) for part in by_sample)
    assert of_samples == pytest.approx(np.abs(gradient).sum()), "a gradient where no sample is"
    return float(loss), {name: float(value) for name, value in metrics.items()}, by_sample


def agree(
    config: LossConfig,
    per_token: PerToken,
    samples: list[Sample],
    *,
    recomputed: bool = True,
    level: str = "token",
) -> None:
    loss, metrics, gradient = found(config, samples, recomputed=recomputed)
    assert loss == pytest.approx(expected(config, per_token, samples, recomputed=recomputed, level=level), rel=1e-12)
    assert set(metrics) == set(policy_metrics(config, reference=True))
    for mine, theirs in zip(
        gradient, differences(config, per_token, samples, recomputed=recomputed, level=level), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-8)


# If a loss has bounds that can be exceeded, they are so narrow that some of the samples exceed them.
CASES: dict[str, tuple[LossConfig, PerToken]] = {
    "ppo_clip": (LossConfig(), ppo(0.2, 0.28, 2.0)),
    "grpo": (LossConfig(name="grpo"), ppo(0.2, 0.2)),
    "dr_grpo": (LossConfig(name="dr_grpo", length_norm=NORM), ppo(0.2, 0.2)),
    "dapo": (LossConfig(name="dapo"), ppo(0.2, 0.28)),
    "rloo": (LossConfig(name="rloo"), rloo),
    "cispo": (LossConfig(name="cispo", clip_high=0.5), cispo(1.0, 0.5)),
    "sapo": (LossConfig(name="sapo"), sapo(1.0, 1.05)),
    "ce": (LossConfig(name="ce"), cross_entropy),
    "sapo, narrow": (LossConfig(name="sapo", gate_positive=3.0, gate_negative=8.0), sapo(3.0, 8.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_those_of_its_paper(name: str) -> None:
    config, per_token = CASES[name]
    agree(config, per_token, some_samples())


def test_gspo_has_the_value_and_the_gradient_of_the_sequence_level_objective() -> None:
    config = LossConfig(name="gspo", clip_low=0.1, clip_high=0.15, importance_sampling="none")
    samples = some_samples(per_token=False)
    _, metrics, _ = found(config, samples)
    assert metrics["clip_ratio/low_mean"] > 0
    assert metrics["clip_ratio/high_mean"] > 0
    agree(config, ppo(0.1, 0.15), samples, level="sequence")


def test_gspo_has_a_gradient_for_each_token_where_their_advantages_differ() -> None:
    config = LossConfig(name="gspo", clip_low=0.1, clip_high=0.15, importance_sampling="none")
    agree(config, ppo(0.1, 0.15), some_samples(), level="sequence, token by token")


def test_gspo_does_not_take_a_samplers_precision_for_another_policy() -> None:
    """A thousandth per token, the error of a sampler in bfloat16, is beyond bounds of 0.0003 and 0.0004."""
    samples = some_samples(spread=0.004, per_token=False, count=40)
    for s in samples:
        s.proximal[:] = s.learner
    _, metrics, silenced = found(LossConfig(name="gspo", importance_sampling="none"), samples)
    assert metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] > 0.2
    _, metrics, heard = found(LossConfig(name="gspo"), samples)
    assert metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] == 0
    assert metrics["importance/limited_mean"] == 0
    assert np.count_nonzero(np.concatenate(silenced)) < 0.8 * np.count_nonzero(np.concatenate(heard))


def test_cispo_silences_no_token_that_ppo_does() -> None:
    samples = [s for s in some_samples() if s.mask.any() and s.advantages.any()]
    trained = np.concatenate([s.mask for s in samples])
    _, metrics, silenced = found(LossConfig(name="dapo"), samples)
    assert metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] > 0.1
    assert not np.concatenate(silenced)[trained].all()
    _, _, heard = found(LossConfig(name="cispo"), samples)
    assert np.concatenate(heard)[trained].all()


def test_every_loss_has_a_recipe_a_surrogate_and_a_reference_here() -> None:
    assert set(SURROGATES) == set(RECIPES) == {*(config.name for config, _ in CASES.values()), "gspo", "dpo"}


def some_pairs() -> list[Sample]:
    """Five pairs, some with the chosen rollout first and some with the rejected one; each rollout has a trained token,
    and two pairs fit into a row."""
    samples = [s for seed in range(5, 12) for s in some_samples(seed) if s.mask.any() and len(s.mask) <= LENGTH // 4]
    samples = samples[:10]
    for index, sample in enumerate(samples):
        sample.advantages = np.full(len(sample.mask), [1.0, -1.0, -1.0, 1.0][index % 4])
    return samples


def dpo(config: LossConfig, samples: list[Sample]) -> tuple[float, float]:
    """Mean over the pairs of -log sigmoid(beta (log ratio of the chosen - log ratio of the rejected)), and the share of
    trained tokens in pairs of the right order."""
    ratios = [float((s.learner - s.reference)[s.mask].sum()) for s in samples]
    signs = [float(s.advantages[0]) for s in samples]
    margins = [signs[i] * ratios[i] + signs[i + 1] * ratios[i + 1] for i in range(0, len(samples), 2)]
    tokens = [int(samples[i].mask.sum() + samples[i + 1].mask.sum()) for i in range(0, len(samples), 2)]
    right = sum(count for count, margin in zip(tokens, margins, strict=True) if margin > 0)
    losses = [math.log1p(math.exp(-config.recipe.beta * margin)) for margin in margins]
    return sum(losses) / len(losses), right / sum(tokens)


PAIRS_IN_ROWS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("rubbish", [0.0, math.nan])
def test_dpo_has_the_value_and_the_gradient_of_its_paper(rubbish: float) -> None:
    config, samples = LossConfig(name="dpo", beta=0.7), some_pairs()
    loss, metrics, gradient = found(config, samples, PAIRS_IN_ROWS, rubbish=rubbish)
    expected_loss, accuracy = dpo(config, samples)
    assert 0 < accuracy < 1
    assert (loss, metrics["pairs/accuracy_mean"]) == pytest.approx((expected_loss, accuracy), rel=1e-12)
    assert set(metrics) == set(policy_metrics(config, reference=True))
    for index, sample in enumerate(samples):
        for t in range(1, len(sample.mask)):
            ends = []
            for h in (1e-5, -1e-5):
                moved = dataclasses.replace(sample, learner=sample.learner + h * (np.arange(len(sample.mask)) == t))
                ends.append(dpo(config, [*samples[:index], moved, *samples[index + 1 :]])[0])
            assert gradient[index][t] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-8)
    shared, _metrics, of_shared = found(config, samples, [[4, 5, 0, 1], [2, 3], [8, 9], [6, 7]])
    assert shared == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(np.concatenate(of_shared), np.concatenate(gradient), atol=1e-12)


@pytest.mark.parametrize(
    "setting", [{"importance_sampling": "masked"}, {"reduction": "token_mean"}, {"reject_token": (0.5, 2.0)}]
)
def test_dpo_refuses_what_has_no_meaning_for_pairs(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="has no meaning"):
        LossConfig(name="dpo", **setting)


def test_dpo_needs_a_reference_and_whole_pairs() -> None:
    with pytest.raises(ConfigurationError, match=r'name is "dpo", but there is no reference'):
        LearnerConfig(loss=LossConfig(name="dpo"))
    with pytest.raises(ConfigurationError, match="needs whole pairs"):
        LearnerConfig(loss=LossConfig(name="dpo"), reference="initial", too_long="truncate")


@pytest.mark.parametrize("reduction", ["sequence_mean_token_mean", "sequence_mean_token_sum_norm"])
def test_a_reduction_weighs_tokens_and_sequences_as_it_says(reduction: str) -> None:
    config, per_token = CASES["cispo"]
    agree(dataclasses.replace(config, reduction=reduction, length_norm=NORM), per_token, some_samples())


@pytest.mark.parametrize(
    ("mode", "level", "recomputed"),
    [
        ("truncated", "token", False),
        ("masked", "token", True),
        ("truncated", "sequence", True),
        ("masked", "geometric", True),
    ],
)
def test_importance_sampling_weighs_the_step_from_generator_to_learner(mode: str, level: str, recomputed: bool) -> None:
    config = LossConfig(importance_sampling=mode, importance_level=level, importance_low=0.8, importance_high=1.25)
    samples = some_samples()
    _, metrics, _ = found(config, samples, recomputed=recomputed)
    assert 0 < metrics["importance/limited_mean"] < 1
    agree(config, ppo(0.2, 0.28, 2.0), samples, recomputed=recomputed)


def test_in_a_steps_only_update_the_weighed_loss_is_the_policy_gradient_at_ratio_one() -> None:
    """With the learner as proximal policy no ratio is clipped, and d r = d log p."""
    config = LossConfig(importance_sampling="truncated", entropy_coefficient=0.0)
    samples = some_samples()
    _, metrics, gradient = found(config, samples, recomputed=False)
    assert metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0.0
    tokens = sum(sample.mask.sum() for sample in samples)
    for mine, sample in zip(gradient, samples, strict=True):
        weight = np.minimum(np.exp(sample.learner - sample.generator), 2.0)
        np.testing.assert_allclose(mine, np.where(sample.mask, -weight * sample.advantages / tokens, 0.0), atol=1e-12)


def test_sequences_that_the_policy_left_behind_teach_nothing_by_negative_advantages() -> None:
    """M = 0 where A < 0 and mean(log generator - log learner) > limit (DeepSeek-V3.2, arXiv:2512.02556)."""
    config = LossConfig(name="grpo", sequence_mask_limit=0.1)
    samples = some_samples(per_token=False)
    left = [s.mask.any() and (s.generator - s.learner)[s.mask].mean() > 0.1 and s.advantages[0] < 0 for s in samples]
    _, metrics, gradient = found(config, samples)
    tokens = sum(sample.mask.sum() for sample in samples)
    masked = sum(sample.mask.sum() for sample, gone in zip(samples, left, strict=True) if gone)
    assert 0 < masked < tokens
    assert metrics["sequence_mask/masked_mean"] == pytest.approx(masked / tokens)
    assert not any(part.any() for part, gone in zip(gradient, left, strict=True) if gone)
    agree(config, ppo(0.2, 0.2), samples)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_from_the_reference_is_added_to_the_loss(estimator: str) -> None:
    config = LossConfig(name="grpo", kl_coefficient=0.3, kl_estimator=estimator)
    agree(config, ppo(0.2, 0.2), some_samples())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_divergence_is_measured_wherever_there_is_a_reference(estimator: str) -> None:
    samples = some_samples()
    log_r = np.concatenate([(s.reference - s.learner)[s.mask] for s in samples])
    divergence = {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[estimator]
    _, metrics, _ = found(LossConfig(kl_estimator=estimator), samples)
    assert metrics["kl/mean"] == pytest.approx(divergence.mean(), rel=1e-12)
    _, metrics, _ = found(LossConfig(kl_estimator=estimator), samples, reference=False)
    assert set(metrics) == set(policy_metrics(LossConfig()))


def test_a_divergence_wanted_without_a_reference_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"set learner\.reference"):
        found(LossConfig(kl_coefficient=0.1), some_samples(), reference=False)
    with pytest.raises(ConfigurationError, match=r"set learner\.reference"):
        LearnerConfig(loss=LossConfig(kl_coefficient=0.1))


def test_the_metrics_are_means_over_trained_tokens_whatever_the_reduction() -> None:
    samples = some_samples()

    def all_of(what: Callable[[Sample], np.ndarray]) -> np.ndarray:
        return np.concatenate([what(sample)[sample.mask] for sample in samples])

    log_ratio, advantage = all_of(lambda s: s.learner - s.generator), all_of(lambda s: s.advantages)
    ratio = np.exp(log_ratio)
    for reduction in ("token_mean", "sequence_mean_token_mean"):
        _, metrics, _ = found(LossConfig(reduction=reduction, ratio_cap=1.2), samples)
        wanted = {
            "entropy/mean": all_of(lambda s: s.entropy).mean(),
            "mismatch_kl/mean": (ratio - 1 - log_ratio).mean(),
            "mismatch_log_ratio/mean": log_ratio.mean(),
            "clip_ratio/low_mean": ((advantage < 0) & (ratio < 0.8)).mean(),
            "clip_ratio/high_mean": ((advantage > 0) & (ratio > 1.28)).mean(),
            "clip_ratio/cap_mean": ((advantage < 0) & (ratio > 1.2)).mean(),
        }
        assert all(wanted.values())
        assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    _, metrics, _ = found(LossConfig(name="cispo", clip_low=0.3, clip_high=0.5), samples)
    limited = {"clip_ratio/low_mean": (ratio < 0.7).mean(), "clip_ratio/high_mean": (ratio > 1.5).mean()}
    assert all(limited.values())
    assert {name: metrics[name] for name in limited} == pytest.approx(limited)
    config = LossConfig(importance_sampling="masked", importance_high=1.1, importance_low=0.9)
    _, metrics, _ = found(config, samples, recomputed=False)
    inside = (ratio >= 0.9) & (ratio <= 1.1)
    assert metrics["importance/limited_mean"] == pytest.approx(1 - inside.mean())
    assert metrics["importance/weight_mean"] == pytest.approx((ratio * inside).mean())


EVERY_KIND = [
    *(CASES[name][0] for name in ("ppo_clip", "rloo", "cispo")),
    LossConfig(name="gspo"),
    *(
        LossConfig(name="grpo", importance_sampling=mode, importance_level=level, kl_coefficient=0.1)
        for mode, level in (("truncated", "token"), ("masked", "sequence"), ("truncated", "geometric"))
    ),
]


def label(config: LossConfig) -> str:
    return f"{config.name}-{config.recipe.importance_sampling}-{config.recipe.importance_level}"


@pytest.mark.parametrize("config", EVERY_KIND, ids=label)
def test_what_stands_where_nothing_is_trained_has_no_effect(config: LossConfig) -> None:
    samples = some_samples()
    loss, metrics, gradient = found(config, samples)
    dirty_loss, dirty_metrics, dirty_gradient = found(config, samples, rubbish=math.nan)
    assert (dirty_loss, dirty_metrics) == (loss, metrics)
    for clean, dirty in zip(gradient, dirty_gradient, strict=True):
        np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("config", EVERY_KIND, ids=label)
def test_rows_without_a_trained_token_add_nothing(config: LossConfig) -> None:
    samples = [dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in some_samples()]
    layout = [[], *row_by_row(samples, LENGTH)]
    loss, metrics, gradient = found(config, samples, layout, rubbish=math.nan)
    assert loss == 0.0
    assert not any(metrics.values())
    assert not np.concatenate(gradient).any()


@pytest.mark.parametrize("config", EVERY_KIND, ids=label)
@pytest.mark.parametrize("recorded", [-math.inf, 0.0])
def test_a_log_probability_beyond_belief_gives_finite_figures(config: LossConfig, recorded: float) -> None:
    samples = some_samples()
    samples[0].generator[samples[0].mask] = recorded
    loss, metrics, gradient = found(config, samples)
    assert np.isfinite([loss, *metrics.values()]).all()
    assert np.isfinite(np.concatenate(gradient)).all()
    assert metrics["mismatch_kl/mean"] > found(config, some_samples())[1]["mismatch_kl/mean"]


@settings(max_examples=15, deadline=None)
@given(data=st.data(), config=st.sampled_from(EVERY_KIND), seed=st.integers(0, 99))
def test_how_a_step_is_split_changes_neither_loss_nor_gradient(
    data: st.DataObject, config: LossConfig, seed: int
) -> None:
    """Rows in any order and number, with samples anywhere in them, give the same result to 1e-12 in float64."""
    samples = some_samples(seed)
    loss, metrics, gradient = found(config, samples)
    order = data.draw(st.permutations(range(len(samples))))
    layout = [[order[i] for i in row] for row in row_by_row([samples[i] for i in order], LENGTH)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(layout) - 1)))) if len(layout) > 1 else []
    parts = [layout[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    split = [found(config, samples, part) for part in parts]
    assert sum(part[0] for part in split) == pytest.approx(loss, abs=1e-12)
    for name, value in metrics.items():
        assert sum(part[1][name] for part in split) == pytest.approx(value, abs=1e-12)
    for index, whole in enumerate(gradient):
        np.testing.assert_allclose(sum(part[2][index] for part in split), whole, atol=1e-12)
