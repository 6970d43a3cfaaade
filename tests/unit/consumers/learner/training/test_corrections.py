"""Rejection, divergences in the reward and distillation against formulas written out in numpy, token by token."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import EFFECTIVE_SAMPLES, LossConfig, policy_metrics, reported
from rollstream.consumers.learner.training.loss import policy_loss_of
from rollstream.topics.errors import ConfigurationError
from tests.support.microbatches import Sample, denominators, microbatch, row_by_row

LENGTH = 24
PLAIN = LossConfig(name="rloo", importance_sampling="none", reduction="token_mean", entropy_coefficient=0.0)
"""-A log p, so that the gradient of a token is its advantage, or 0 where it is masked."""


def some_samples(spread: float = 0.4, count: int = 12) -> list[Sample]:
    draw = np.random.default_rng(11)
    collected = []
    for _ in range(count):
        length = int(draw.integers(3, 8))
        mask = draw.random(length) < 0.8
        mask[0], mask[-1] = False, True
        learner = -draw.gamma(2.0, 1.0, length)
        others = {
            name: learner + spread * draw.normal(size=length)
            for name in ("generator", "proximal", "reference", "teacher")
        }
        collected.append(
            Sample(
                mask=mask,
                advantages=draw.normal(size=length),
                learner=learner,
                entropy=draw.gamma(2.0, 0.5, length),
                tokens=draw.integers(0, 50, length).astype(np.int32),
                **others,
            )
        )
    return collected


def advantages_trained(config: LossConfig, samples: Sequence[Sample]) -> tuple[list[NDArray], dict[str, float]]:
    """The advantage by which our code raises the log-probability of each trained token, and the metrics."""
    layout = row_by_row(samples, LENGTH)
    batch = microbatch(samples, layout, LENGTH, config, dtype=np.float64, rubbish=math.nan)
    del batch["proximal_log_probs"]
    learner, entropy = (np.nan_to_num(batch.pop(name)[:, 1:]) for name in ("learner", "entropy"))
    with jax.enable_x64(True):
        differentiated = jax.jit(jax.value_and_grad(policy_loss_of, has_aux=True), static_argnums=2)
        (_loss, metrics), gradient = differentiated(learner, entropy, config, batch, denominators(samples, np.float64))
        padded = np.pad(np.asarray(gradient), ((0, 0), (1, 0))) * -float(sum(s.mask.sum() for s in samples))
    by_sample: list[NDArray] = []
    for row, members in enumerate(layout):
        start = 0
        for index in members:
            length = len(samples[index].mask)
            by_sample.append(padded[row, start : start + length][samples[index].mask])
            start += length
    assert {*metrics} == {*policy_metrics(config, reference=True, teacher=True)}
    return by_sample, {name: float(value) for name, value in metrics.items()}


def check(config: LossConfig, samples: Sequence[Sample], advantage: Callable[[Sample], NDArray]) -> dict[str, float]:
    actual, metrics = advantages_trained(config, samples)
    for sample, mine in zip(samples, actual, strict=True):
        np.testing.assert_allclose(mine, advantage(sample), atol=1e-12)
    return metrics


# ------------------------------------------------------------------------------------------------------- rejection


def verl_keeps(option: str, lower: float, upper: float) -> Callable[[NDArray], NDArray]:
    """The rule of verl's compute_rollout_rejection_mask (verl/trainer/ppo/rollout_corr_helper.py) for k1 options.

    verl bounds k1 = log generator - log learner by logarithms of its bounds, so its bounds limit the inverse of the
    ratio used here.
    """

    def keeps(log_ratio: NDArray) -> NDArray:
        k1 = -np.clip(log_ratio, -20.0, 20.0)
        if option == "seq_sum_k1":
            k1 = np.full_like(k1, k1.sum())
        elif option == "seq_mean_k1":
            k1 = np.full_like(k1, k1.mean())
        return (k1 >= math.log(lower)) & (k1 <= math.log(upper))

    return keeps


@pytest.mark.parametrize(
    ("level", "option", "bounds"),
    [
        ("token", "token_k1", (0.7, 1.3)),
        ("sequence", "seq_sum_k1", (0.4, 1.8)),
        ("geometric", "seq_mean_k1", (0.9, 1.1)),
    ],
)
def test_tokens_and_sequences_are_rejected_as_verl_rejects_them(
    level: str, option: str, bounds: tuple[float, float]
) -> None:
    low, high = bounds
    config = replace(PLAIN, **{f"reject_{level}": bounds})
    keeps = verl_keeps(option, 1 / high, 1 / low)
    samples = some_samples()

    def kept(sample: Sample) -> NDArray:
        return keeps((sample.learner - sample.generator)[sample.mask])

    metrics = check(config, samples, lambda sample: sample.advantages[sample.mask] * kept(sample))
    share = np.concatenate([kept(sample) for sample in samples]).mean()
    assert 0.1 < share < 0.9
    assert metrics[f"rejection/{level}_mean"] == pytest.approx(1 - share)


def test_what_passes_every_bound_is_kept_and_nothing_else() -> None:
    config = replace(PLAIN, reject_token=(0.6, 1.6), reject_geometric=(0.9, 1.2))

    def advantage(sample: Sample) -> NDArray:
        ratio = np.exp(sample.learner - sample.generator)[sample.mask]
        mean = np.prod(ratio) ** (1 / len(ratio))
        return sample.advantages[sample.mask] * ((ratio >= 0.6) & (ratio <= 1.6) & (0.9 <= mean <= 1.2))

    metrics = check(config, some_samples(), advantage)
    assert 0 < metrics["rejection/token_mean"] < 1
    assert 0 < metrics["rejection/geometric_mean"] < 1


def test_rejection_leaves_weights_entropy_and_divergence_alone() -> None:
    """Tokens that pass are weighted by importance sampling as before."""
    config = replace(PLAIN, importance_sampling="truncated", importance_level="token", importance_high=1.2)
    config = replace(config, reject_token=(0.7, 1.5), entropy_coefficient=0.1)

    def advantage(sample: Sample) -> NDArray:
        ratio = np.exp(sample.learner - sample.generator)[sample.mask]
        return sample.advantages[sample.mask] * np.minimum(ratio, 1.2) * ((ratio >= 0.7) & (ratio <= 1.5))

    check(config, some_samples(), advantage)


def test_the_effective_sample_size_is_that_of_the_weights_that_train() -> None:
    """(sum w)^2 / (n sum w^2), as verl computes rollout_is_eff_sample_size of normalized weights: 1 / mean(square)."""
    samples = some_samples()
    ratio = np.concatenate([np.exp(s.learner - s.generator)[s.mask] for s in samples])
    kept = np.where((ratio >= 0.7) & (ratio <= 1.5), ratio, 0.0)
    for config, weights in (
        (replace(PLAIN, reject_token=(0.7, 1.5)), kept),
        (replace(PLAIN, importance_sampling="truncated", importance_level="token"), np.minimum(ratio, 2.0)),
    ):
        _, metrics = advantages_trained(config, samples)
        normalized = weights / weights.mean()
        assert reported(metrics)[EFFECTIVE_SAMPLES] == pytest.approx(1 / np.square(normalized).mean(), rel=1e-12)
    assert reported({"importance/kept_weight_mean": 0.0, "importance/kept_square_mean": 0.0}) == {
        EFFECTIVE_SAMPLES: 0.0
    }
    assert reported({"loss": 1.0}) == {"loss": 1.0}


def test_of_equal_policies_every_sample_counts_and_none_is_rejected() -> None:
    samples = [replace(s, generator=s.learner) for s in some_samples()]
    config = replace(PLAIN, reject_token=(1.0, 1.0), reject_sequence=(1.0, 1.0), reject_geometric=(1.0, 1.0))
    metrics = check(config, samples, lambda s: s.advantages[s.mask])
    assert reported(metrics)[EFFECTIVE_SAMPLES] == pytest.approx(1.0)


# ---------------------------------------------------------------------------------------- reference and teacher


def divergence(estimator: str, sample: Sample) -> NDArray:
    """k1, k2 and k3 (http://joschu.net/blog/kl-approx.html) at the trained tokens."""
    log_r = (sample.reference - sample.learner)[sample.mask]
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_in_the_reward_is_taken_from_the_advantage_of_its_token(estimator: str) -> None:
    config = replace(PLAIN, kl_coefficient=0.3, kl_estimator=estimator, kl_place="advantage")
    samples = some_samples()
    metrics = check(config, samples, lambda s: s.advantages[s.mask] - 0.3 * divergence(estimator, s))
    whole = np.concatenate([divergence(estimator, s) for s in samples])
    assert metrics["kl/mean"] == pytest.approx(whole.mean())


def test_as_part_of_the_return_it_is_summed_to_the_end_of_the_sequence() -> None:
    """REINFORCE++ (arXiv:2501.03262), equation of the advantage: r - beta times the sum of KL(i) for i = t to T."""
    config = replace(PLAIN, kl_coefficient=0.3, kl_estimator="k1", kl_place="return")

    def advantage(sample: Sample) -> NDArray:
        charged = divergence("k1", sample)
        to_go = np.array([charged[t:].sum() for t in range(len(charged))])
        return sample.advantages[sample.mask] - 0.3 * to_go

    check(config, some_samples(), advantage)


def test_a_teacher_adds_the_reverse_divergence_to_each_advantage() -> None:
    """As in tinker's recipe of on-policy distillation: minus a coefficient times reverse_kl is added to the advantages,
    where reverse_kl = log p(student) - log p(teacher)."""
    config = replace(PLAIN, reward_coefficient=0.5, distillation_coefficient=0.7)
    samples = some_samples()

    def advantage(sample: Sample) -> NDArray:
        reverse_kl = (sample.learner - sample.teacher)[sample.mask]
        return 0.5 * sample.advantages[sample.mask] - 0.7 * reverse_kl

    metrics = check(config, samples, advantage)
    reverse = np.concatenate([(s.learner - s.teacher)[s.mask] for s in samples])
    assert metrics["distillation/kl_mean"] == pytest.approx(reverse.mean())


def test_settings_that_would_teach_nothing_are_refused() -> None:
    for settings, says in (
        ({"reject_token": (0.5,)}, r"learner\.loss\.reject_token is \[0\.5\]"),
        ({"reject_sequence": (1.5, 2.0)}, r"learner\.loss\.reject_sequence"),
        ({"reject_geometric": (0.5, 0.9)}, r"learner\.loss\.reject_geometric"),
        ({"reward_coefficient": 0.0}, "nothing would be learned"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, 'kl_place to "advantage"'),
    ):
        with pytest.raises(ConfigurationError, match=says):
            LossConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"set learner\.teacher"):
        LearnerConfig(loss=LossConfig(distillation_coefficient=0.1))
    with pytest.raises(ConfigurationError, match=r"set learner\.reference"):
        LearnerConfig(loss=LossConfig(kl_coefficient=0.1, kl_estimator="k1", kl_place="advantage"))
    samples = [dataclasses.replace(s, teacher=None) for s in some_samples()]
    with pytest.raises(ConfigurationError, match=r"set learner\.teacher"):
        advantages_trained(replace(PLAIN, distillation_coefficient=0.1), samples)
