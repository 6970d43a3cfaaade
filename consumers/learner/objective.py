"""Settings of the loss and of the optimizer, and what follows from them before anything is computed; no JAX.

A loss is a surrogate together with its paper's own defaults, a recipe; whatever is set explicitly wins over the recipe.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from topics.errors import ConfigurationError

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"]
ImportanceSampling = Literal["none", "truncated", "masked"]
ImportanceLevel = Literal["token", "sequence", "geometric"]


MISMATCH_METRICS = ("mismatch_kl/mean", "mismatch_log_ratio/mean")
"""Names of the metrics that compare learner and sampler."""


class Recipe(NamedTuple):
    """What a loss does where nothing else is set. Every field is also an optional field of LossConfig."""

    reduction: Reduction = "token_mean"
    length_norm: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = math.inf
    entropy_coefficient: float = 0.0
    importance_sampling: ImportanceSampling = "none"
    importance_level: ImportanceLevel = "token"
    train_truncated: bool = True


RECIPES: dict[str, Recipe] = {
    "ppo_clip": Recipe(clip_high=0.28, ratio_cap=2.0, entropy_coefficient=0.005),
    "grpo": Recipe(reduction="sequence_mean_token_mean"),
    "dr_grpo": Recipe(reduction="sequence_mean_token_sum_norm"),
    "dapo": Recipe(clip_high=0.28, train_truncated=False),
    "rloo": Recipe(
        reduction="sequence_mean_token_sum_norm",
        length_norm=1.0,
        importance_sampling="truncated",
        importance_level="sequence",
    ),
    # Against the generator, a sampler's precision alone is beyond bounds as close as these.
    "gspo": Recipe(
        reduction="sequence_mean_token_mean",
        clip_low=3e-4,
        clip_high=4e-4,
        importance_sampling="truncated",
        importance_level="geometric",
    ),
    # 1 - 1: no lower bound.
    "cispo": Recipe(clip_low=1.0, clip_high=5.0),
}
"""In this order: arXiv:1707.06347, 2402.03300, 2503.20783, 2503.14476, 2402.14740, 2507.18071, 2506.13585."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy-gradient loss. What is unset is as the loss's paper has it: docs/losses.md."""

    name: Literal["ppo_clip", "grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"] = "ppo_clip"
    """Which loss."""
    reduction: Reduction | None = None
    """Mean over all tokens; mean over sequences of their tokens' mean; or of their tokens' sum over length_norm."""
    length_norm: float | None = None
    """Constant of sequence_mean_token_sum_norm, for example the most tokens a completion may have."""
    clip_low: float | None = None
    """Ratios below 1 - clip_low earn no more for negative advantages (PPO, arXiv:1707.06347)."""
    clip_high: float | None = None
    """Ratios above 1 + clip_high earn no more for positive advantages (clip-higher of DAPO, arXiv:2503.14476)."""
    ratio_cap: float | None = None
    """Ratios above this are not pushed down further for negative advantages (dual clip, arXiv:1912.09729)."""
    entropy_coefficient: float | None = None
    """Weight of the token entropy that is added to the objective."""
    importance_sampling: ImportanceSampling | None = None
    """Unless "none", ratios are against the learner before the step, which is weighed against the generator."""
    importance_level: ImportanceLevel | None = None
    """That weight: the token's ratio, its sequence's product of ratios, or that product's geometric mean."""
    importance_low: float = 0.5
    """Weights below count as 0 where importance_sampling is "masked" (IcePop, arXiv:2510.18855)."""
    importance_high: float = 2.0
    """Weights above count as this where it is "truncated" (arXiv:1802.01561), as 0 where it is "masked"."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from a reference model that is added to the loss; needs learner.reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence (http://joschu.net/blog/kl-approx.html)."""
    train_truncated: bool | None = None
    """Train on rollouts that were cut off before their end; otherwise their tokens are masked."""
    mismatch_limit: float = 0.02
    """Warn where mismatch_kl/mean is above this where all rollouts are of the newest policy."""
    stale_mismatch_limit: float = 0.05
    """Added to it for each step the rollouts are old in the mean: older policies differ for a reason."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        bounds = {
            "clip_low": (recipe.clip_low, 0.0, 1.0),
            "clip_high": (recipe.clip_high, 0.0, math.inf),
            "ratio_cap": (recipe.ratio_cap, 1.0, math.inf),
            "entropy_coefficient": (recipe.entropy_coefficient, 0.0, math.inf),
            "kl_coefficient": (self.kl_coefficient, 0.0, math.inf),
            "importance_low": (self.importance_low, 0.0, 1.0),
            "importance_high": (self.importance_high, 1.0, math.inf),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ConfigurationError(f"learner.loss.{name} is {value}; it must be between {low} and {high}")
        if recipe.reduction == "sequence_mean_token_sum_norm" and not recipe.length_norm > 0:
            raise ConfigurationError(
                f"loss {self.name!r} divides each sequence's sum by a constant that must not depend on the data; set "
                "learner.loss.length_norm, for example to the most tokens a completion may have"
            )
        if self.kl_coefficient and self.kl_estimator == "k1":
            raise ConfigurationError(
                'learner.loss.kl_estimator "k1" has a gradient of mean zero, so kl_coefficient would pull nowhere; '
                'take "k3"'
            )

    @cached_property
    def recipe(self) -> Recipe:
        """The loss's own recipe with what is set here in its place. Raises ConfigurationError for an unknown loss."""
        own = RECIPES.get(self.name)
        if own is None:
            raise ConfigurationError(f"there is no loss {self.name!r}; there are {', '.join(RECIPES)}")
        given: dict[str, Any] = {name: getattr(self, name) for name in Recipe._fields}
        return own._replace(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer behind global-norm clipping, and its schedule."""

    name: Literal["adamw", "adam", "sgd", "lion", "muon", "adafactor"] = "adamw"
    """optax's optimizer of that name; muon leaves embedding, head, norms and biases to adam."""
    learning_rate: float = 2e-3
    """The highest one; where it is not set and learner.pretrained is, 1e-6."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How it goes to final_learning_rate, or not."""
    final_learning_rate: float = 4e-4
    """At the last update of `max_steps` and after; where it is not set and learner.pretrained is, a fifth of the
    highest."""
    warmup_updates: int = 0
    """Updates in which it rises linearly to learning_rate first."""
    beta1: float = 0.9
    """Decay of the first moment; momentum of sgd (0: none) and of muon."""
    beta2: float = 0.95
    """Decay of the second moment; of lion's momentum."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases never decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them."""

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and self.final_learning_rate >= 0 and self.warmup_updates >= 0):
            raise ConfigurationError(
                f"learner.optimizer has learning_rate {self.learning_rate}, final_learning_rate "
                f"{self.final_learning_rate}, warmup_updates {self.warmup_updates}: give a rate above 0, the others "
                "not below 0"
            )
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise ConfigurationError(
                f"learner.optimizer.name {self.name!r} has no weight decay, but weight_decay is {self.weight_decay}; "
                'take "adamw", or set it to 0'
            )


def token_weight(config: LossConfig, trained_tokens: int) -> float:
    """Weight of each trained token's loss in a sequence with `trained_tokens` of them, at least 1.

    1 for the mean over tokens (DAPO, arXiv:2503.14476), 1/n for the mean of means (GRPO, arXiv:2402.03300), 1/constant
    for the mean of sums over a constant (Dr. GRPO, arXiv:2503.20783).
    """
    recipe = config.recipe
    if recipe.reduction == "sequence_mean_token_mean":
        return 1.0 / trained_tokens
    return 1.0 / recipe.length_norm if recipe.reduction == "sequence_mean_token_sum_norm" else 1.0


def denominator_of(config: LossConfig) -> Literal["tokens", "sequences"]:
    """What the sum of weighted token losses is divided by: trained tokens, or sequences that have any."""
    return "tokens" if config.recipe.reduction == "token_mean" else "sequences"


def trains(config: LossConfig, truncated: bool) -> bool:
    """Whether a rollout's tokens, `truncated` or not, are trained at all (overlong filtering, arXiv:2503.14476)."""
    return config.recipe.train_truncated or not truncated


def needs_proximal(config: LossConfig, updates_per_step: int) -> bool:
    """Whether a step of several updates must compute log-probabilities before the first (`proximal_log_probs`).

    In a step of one update those of the update itself are the same.
    """
    return config.recipe.importance_sampling != "none" and updates_per_step > 1


def needs_reference(config: LossConfig) -> bool:
    """Whether the loss cannot do without `reference_log_probs`."""
    return config.kl_coefficient > 0


def policy_metrics(config: LossConfig, *, reference: bool = False) -> tuple[str, ...]:
    """Names of the metrics of `policy_loss`, where its batches have `reference_log_probs` or not."""
    names: tuple[str, ...] = (
        "loss",
        "entropy/mean",
        *MISMATCH_METRICS,
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/cap_mean",
    )
    if config.recipe.importance_sampling != "none":
        names += ("importance/weight_mean", "importance/limited_mean")
    return (*names, "kl/mean") if reference else names
