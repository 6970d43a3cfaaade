"""Settings of the loss and of the optimizer, and values derived from them; imports no JAX.

A loss is a surrogate with a recipe, which holds the defaults of its paper; explicit settings override the recipe.
Users' losses, schedules and optimizers are named here and imported in `user_objectives`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.user_code import is_plug_in

if TYPE_CHECKING:
    import jax

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"]
ImportanceSampling = Literal["none", "truncated", "masked"]
ImportanceLevel = Literal["token", "sequence", "geometric"]


LOSSES, SCHEDULES, OPTIMIZERS = "rollstream.losses", "rollstream.schedules", "rollstream.optimizers"
"""Groups of entry points under which installed packages register their own."""

Schedule = Literal["cosine", "linear", "constant"]
Optimizer = Literal["adamw", "adam", "sgd", "lion", "muon", "adafactor"]

KlPlace = Literal["loss", "advantage", "return"]
REJECTION_LEVELS = ("token", "sequence", "geometric")

WEIGHT_MOMENTS = ("importance/kept_weight_mean", "importance/kept_square_mean")
"""Means of the weights that tokens were trained with, and of their squares; `reported` combines them."""
EFFECTIVE_SAMPLES = "importance/effective_sample_fraction"

_HIGHEST_DECAY = 1 - 1e-7
"""Highest decay of a moment that is below 1 in float32: corrections for the first updates divide by 1 minus decay."""
_LOWEST_EPSILON = 1e-30
"""Lowest epsilon that is above 0 in float32 even multiplied by 1 minus the highest decay, as compilers do: numbers
below the normal range are flushed to 0."""
_HIGHEST_WEIGHT_DECAY = 1e6

PAIR_ACCURACY = "pairs/accuracy_mean"
"""Share of tokens whose pair the learner, compared with the reference, orders as the rewards do."""

MISMATCH_METRICS = ("mismatch_kl/mean", "mismatch_log_ratio/mean")
"""Names of the metrics that compare learner and sampler."""
COMPARED = "mismatch_kl/compared_mean"
"""With several losses: share of tokens whose loss compares learner and sampler, by which `reported` divides these."""


class TokenArrays(NamedTuple):
    """Arrays [rows, tokens]; all but `segment_ids` are 0 at tokens that are not trained."""

    log_probs: "jax.Array"
    """Log-probabilities of the learner, differentiated."""
    log_ratio: "jax.Array"
    """Log ratio of the learner to the generator or, with importance sampling, to the policy before the step, or, for
    pairs, to the reference; differentiated."""
    advantages: "jax.Array"
    """Advantage of each token."""
    mask: "jax.Array"
    """1 where the token is trained, else 0."""
    segment_ids: "jax.Array"
    """Number of the token's sequence within its row."""


class TokenLoss(NamedTuple):
    """Arrays [rows, tokens]: the loss of each token, and which tokens are beyond each bound."""

    loss: "jax.Array"
    low: "jax.Array"
    high: "jax.Array"
    cap: "jax.Array"


class LossRecipe(NamedTuple):
    """Defaults of a loss. Every field is also an optional field of LossConfig."""

    reduction: Reduction = "token_mean"
    length_norm: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = math.inf
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    beta: float = 0.1
    entropy_coefficient: float = 0.0
    importance_sampling: ImportanceSampling = "none"
    importance_level: ImportanceLevel = "token"
    train_truncated: bool = True


RECIPES: dict[str, LossRecipe] = {
    "ppo_clip": LossRecipe(clip_high=0.28, ratio_cap=2.0, entropy_coefficient=0.005),
    "grpo": LossRecipe(reduction="sequence_mean_token_mean"),
    "dr_grpo": LossRecipe(reduction="sequence_mean_token_sum_norm"),
    "dapo": LossRecipe(clip_high=0.28, train_truncated=False),
    "rloo": LossRecipe(
        reduction="sequence_mean_token_sum_norm",
        length_norm=1.0,
        importance_sampling="truncated",
        importance_level="sequence",
    ),
    # Ratios against the generator exceed bounds this tight merely because of the sampler's precision.
    "gspo": LossRecipe(
        reduction="sequence_mean_token_mean",
        clip_low=3e-4,
        clip_high=4e-4,
        importance_sampling="truncated",
        importance_level="geometric",
    ),
    # The lower bound 1 - clip_low is 0, so it limits no ratio.
    "cispo": LossRecipe(clip_low=1.0, clip_high=5.0),
    "sapo": LossRecipe(reduction="sequence_mean_token_mean"),
    "ce": LossRecipe(),
    # The mean over both sequences of a pair, each with the loss of the pair, is the mean over pairs.
    "dpo": LossRecipe(reduction="sequence_mean_token_mean"),
}
"""Recipes by the name of the loss. Their papers, in this order: arXiv:1707.06347, 2402.03300, 2503.20783, 2503.14476,
2402.14740, 2507.18071, 2506.13585, 2511.20347; `ce` is supervised training; `dpo` is arXiv:2305.18290."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy-gradient loss. Unset fields have the values of the loss's paper: docs/losses.md."""

    name: str = "ppo_clip"
    """Name of the loss: one of docs/losses.md, or one of your own (docs/losses.md#your-own-objectives)."""
    reduction: Reduction | None = None
    """Mean over all tokens; or mean over sequences, of each sequence's token mean or its token sum over length_norm."""
    length_norm: float | None = None
    """Constant of sequence_mean_token_sum_norm, for example the token limit of a completion."""
    clip_low: float | None = None
    """For negative advantages (cispo: for all), ratios below 1 - clip_low have no further effect (PPO,
    arXiv:1707.06347)."""
    clip_high: float | None = None
    """For positive advantages (cispo: for all), ratios above 1 + clip_high have no further effect (clip-higher of DAPO,
    arXiv:2503.14476)."""
    ratio_cap: float | None = None
    """For negative advantages, ratios above this have no further effect (dual clip, arXiv:1912.09729)."""
    gate_positive: float | None = None
    """Temperature of the soft gate of sapo for positive advantages: higher temperatures narrow the gate
    (arXiv:2511.20347)."""
    gate_negative: float | None = None
    """Temperature of the soft gate of sapo for advantages that are not positive."""
    beta: float | None = None
    """Strength of dpo's bond to the reference: the factor of the pair's log ratios (arXiv:2305.18290)."""
    entropy_coefficient: float | None = None
    """Weight of the token entropy in the objective."""
    importance_sampling: ImportanceSampling | None = None
    """Unless "none", ratios are to the policy before the step, and its ratio to the generator weights the loss."""
    importance_level: ImportanceLevel | None = None
    """Definition of the importance weight: the ratio of the token, the product of ratios of its sequence, or their
    geometric mean."""
    importance_low: float = 0.5
    """Lower bound of weights: "masked" importance sampling sets lower weights to 0 (IcePop, arXiv:2510.18855)."""
    importance_high: float = 2.0
    """Upper bound of weights: "truncated" importance sampling clips higher weights to it (arXiv:1802.01561),
    "masked" sets them to 0."""
    reject_token: tuple[float, ...] = ()
    """Lower and upper bound of a token's ratio of learner to generator: tokens outside are masked; empty: no bounds."""
    reject_sequence: tuple[float, ...] = ()
    """Lower and upper bound of the product of a sequence's ratios of learner to generator: sequences outside are
    masked; empty: no bounds."""
    reject_geometric: tuple[float, ...] = ()
    """Lower and upper bound of the geometric mean of a sequence's ratios of learner to generator: sequences outside
    are masked; empty: no bounds."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from a reference model; needs learner.reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the reference model (http://joschu.net/blog/kl-approx.html)."""
    kl_place: KlPlace = "loss"
    """loss adds the divergence to each token's loss; advantage subtracts it from each token's advantage, as part of the
    reward; return subtracts from each token's advantage the sum of the divergence from there to the sequence's end."""
    reward_coefficient: float = 1.0
    """Weight of the advantages that grouping computed; 0 for distillation alone."""
    distillation_coefficient: float = 0.0
    """Weight of the teacher's log-probability minus the learner's, added to each token's advantage; needs
    learner.teacher."""
    train_truncated: bool | None = None
    """Train on truncated rollouts; otherwise their tokens are masked."""
    sequence_mask_limit: float = 0.0
    """Sequences with a negative advantage are masked if the mean over their tokens of the generator's log-probability
    minus the learner's is above this (off-policy sequence masking of DeepSeek-V3.2, arXiv:2512.02556); 0: no limit."""
    mismatch_limit: float = 0.02
    """Warn if mismatch_kl/mean is above this for rollouts of the newest policy."""
    stale_mismatch_limit: float = 0.05
    """Added to mismatch_limit for each step of the mean age of the rollouts, because older policies differ from the
    learner."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        bounds = {
            "clip_low": (recipe.clip_low, 0.0, 1.0),
            "clip_high": (recipe.clip_high, 0.0, math.inf),
            "ratio_cap": (recipe.ratio_cap, 1.0, math.inf),
            "gate_positive": (recipe.gate_positive, 1e-3, math.inf),
            "gate_negative": (recipe.gate_negative, 1e-3, math.inf),
            "beta": (recipe.beta, 1e-6, math.inf),
            "entropy_coefficient": (recipe.entropy_coefficient, 0.0, math.inf),
            "sequence_mask_limit": (self.sequence_mask_limit, 0.0, math.inf),
            "kl_coefficient": (self.kl_coefficient, 0.0, math.inf),
            "reward_coefficient": (self.reward_coefficient, 0.0, math.inf),
            "distillation_coefficient": (self.distillation_coefficient, 0.0, math.inf),
            "importance_low": (self.importance_low, 0.0, 1.0),
            "importance_high": (self.importance_high, 1.0, math.inf),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ConfigurationError(f"learner.loss.{name} is {value}; it must be between {low} and {high}")
        if recipe.reduction == "sequence_mean_token_sum_norm" and not recipe.length_norm > 0:
            raise ConfigurationError(
                f"loss {self.name!r} divides each sequence's sum by a constant that must not depend on the data; set "
                "learner.loss.length_norm, for example to the token limit of a completion"
            )
        for level, bounds_of in self.rejections.items():
            if len(bounds_of) != 2 or not 0.0 <= bounds_of[0] <= 1.0 <= bounds_of[1]:
                raise ConfigurationError(
                    f"learner.loss.reject_{level} is {list(bounds_of)}; give a lower bound of at most 1 and an upper "
                    "bound of at least 1, such as [0.5, 2.0]"
                )
        if self.kl_coefficient and self.kl_estimator == "k1" and self.kl_place == "loss":
            raise ConfigurationError(
                'learner.loss.kl_estimator "k1" has a gradient of mean zero, so kl_coefficient would have no effect; '
                'set it to "k3", or kl_place to "advantage"'
            )
        if not self.reward_coefficient and not self.distillation_coefficient:
            raise ConfigurationError(
                "learner.loss.reward_coefficient is 0, so nothing would be learned; set "
                "learner.loss.distillation_coefficient and learner.teacher, or leave reward_coefficient at 1"
            )

        unlike_pairs = {
            "reduction": recipe.reduction != RECIPES["dpo"].reduction,
            "importance_sampling": recipe.importance_sampling != "none",
            "reject_*": bool(self.rejections),
            "sequence_mask_limit": bool(self.sequence_mask_limit),
            "kl_place": bool(self.kl_coefficient) and self.kl_place != "loss",
            "reward_coefficient": self.reward_coefficient != 1.0,
            "distillation_coefficient": bool(self.distillation_coefficient),
        }
        if in_pairs(self) and any(unlike_pairs.values()):
            settings = ", ".join(name for name, is_set in unlike_pairs.items() if is_set)
            raise ConfigurationError(
                f'learner.loss.name "dpo" compares the two rollouts of a pair, for which {settings} under '
                "[learner.loss] has no meaning: leave it at its default"
            )

    @property
    def compares_sampler(self) -> bool:
        """Whether the loss depends on the log-probabilities that were recorded when the rollouts were sampled."""
        return self.name not in ("ce", "dpo")

    @property
    def rejections(self) -> dict[str, tuple[float, ...]]:
        """Bounds of the ratio beyond which tokens or sequences are masked, by level; only levels that have bounds."""
        every = {level: getattr(self, f"reject_{level}") for level in REJECTION_LEVELS}
        return {level: bounds for level, bounds in every.items() if bounds}

    @cached_property
    def recipe(self) -> LossRecipe:
        """The recipe of the loss, overridden by explicit settings. Raises ConfigurationError for an unknown loss."""
        own = RECIPES.get(self.name)
        if own is None:
            _check_known("loss", self.name, RECIPES, LOSSES)
            own = LossRecipe()
        settings: dict[str, Any] = {name: getattr(self, name) for name in LossRecipe._fields}
        return own._replace(**{name: value for name, value in settings.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, after global-norm clipping, and its schedule."""

    name: str = "adamw"
    """Optimizer: adamw, adam, sgd, lion, muon (which leaves embedding, head, norms and biases to adam), adafactor, or
    one of your own (docs/losses.md#your-own-objectives)."""
    learning_rate: float = 2e-3
    """Highest learning rate; 1e-6 if this is unset and learner.pretrained is set."""
    schedule: str = "cosine"
    """Course of the learning rate: cosine or linear, to final_learning_rate; constant; or one of your own
    (docs/losses.md#your-own-objectives)."""
    final_learning_rate: float = 4e-4
    """Learning rate at the last update of `max_steps` and after; a fifth of learning_rate if this is unset and
    learner.pretrained is set."""
    warmup_updates: int = 0
    """Updates over which the learning rate first rises linearly to learning_rate."""
    beta1: float = 0.9
    """Decay of the first moment, at least 0 and below 1; momentum of sgd (0: none) and of muon."""
    beta2: float = 0.95
    """Decay of the second moment, and of the momentum of lion; at least 0 and below 1."""
    epsilon: float = 1e-8
    """Added to the root of the second moment; above 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases never decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns this off."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which moments are kept: float32, or bfloat16 with stochastic rounding, for half the memory."""

    def __post_init__(self) -> None:
        _check_known("optimizer", self.name, get_args(Optimizer), OPTIMIZERS)
        _check_known("schedule", self.schedule, get_args(Schedule), SCHEDULES)
        rates = math.inf > self.learning_rate > 0 and math.inf > self.final_learning_rate >= 0
        if not (rates and self.warmup_updates >= 0):
            raise ConfigurationError(
                f"learner.optimizer has learning_rate {self.learning_rate}, final_learning_rate "
                f"{self.final_learning_rate}, warmup_updates {self.warmup_updates}: give a learning rate above 0, and "
                "at least 0 for the other two; all of them finite"
            )
        bounds = {
            "beta1": (self.beta1, 0.0, _HIGHEST_DECAY),
            "beta2": (self.beta2, 0.0, _HIGHEST_DECAY),
            "epsilon": (self.epsilon, _LOWEST_EPSILON, math.inf),
            "weight_decay": (self.weight_decay, 0.0, _HIGHEST_WEIGHT_DECAY),
            "max_grad_norm": (self.max_grad_norm, 0.0, math.inf),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ConfigurationError(f"learner.optimizer.{name} is {value}; it must be between {low} and {high}")
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise ConfigurationError(
                f"learner.optimizer.name {self.name!r} has no weight decay, but weight_decay is {self.weight_decay}; "
                'set name to "adamw", or weight_decay to 0'
            )


def token_weight(config: LossConfig, trained_tokens: int) -> float:
    """Weight of each trained token's loss in a sequence of `trained_tokens` (at least 1) trained tokens.

    1 for the mean over tokens (DAPO, arXiv:2503.14476), 1/n for the mean of means (GRPO, arXiv:2402.03300), 1/constant
    for the mean of sums over a constant (Dr. GRPO, arXiv:2503.20783).
    """
    recipe = config.recipe
    if recipe.reduction == "sequence_mean_token_mean":
        return 1.0 / trained_tokens
    return 1.0 / recipe.length_norm if recipe.reduction == "sequence_mean_token_sum_norm" else 1.0


def denominator_of(config: LossConfig) -> Literal["tokens", "sequences"]:
    """Denominator of the sum of weighted token losses: trained tokens, or sequences with trained tokens."""
    return "tokens" if config.recipe.reduction == "token_mean" else "sequences"


def trains(config: LossConfig, truncated: bool) -> bool:
    """Whether the tokens of a rollout, `truncated` or not, are trained (overlong filtering, arXiv:2503.14476)."""
    return config.recipe.train_truncated or not truncated


def needs_proximal(config: LossConfig, updates_per_step: int) -> bool:
    """Whether a step must compute log-probabilities before its first update (`proximal_log_probs`).

    With one update per step, they equal the log-probabilities of the update itself.
    """
    return config.recipe.importance_sampling != "none" and updates_per_step > 1


def in_pairs(config: LossConfig) -> bool:
    """Whether the loss compares two rollouts, which must therefore lie in the same row, one after the other."""
    return config.name == "dpo"


def needs_reference(config: LossConfig) -> bool:
    """Whether the loss needs `reference_log_probs`."""
    return config.kl_coefficient > 0 or in_pairs(config)


def needs_teacher(config: LossConfig) -> bool:
    """Whether the loss needs `teacher_log_probs`."""
    return config.distillation_coefficient > 0


def beside(config: LossConfig, name: str) -> LossConfig:
    """Return the loss `name` for a step that `config` reduces: with its settings, and its reduction.

    Nothing bounds or weights a loss that does not compare the sampler, because what its rollouts record may mean
    nothing. Raises ConfigurationError for an unknown loss.
    """
    own = replace(config, name=name, reduction=config.recipe.reduction, length_norm=config.recipe.length_norm)
    if own.compares_sampler:
        return own
    bounds: dict[str, Any] = {f"reject_{level}": () for level in REJECTION_LEVELS}
    return replace(own, importance_sampling="none", sequence_mask_limit=0.0, **bounds)


def reported(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of one update as they are reported, given the sums from `policy_loss` over the update.

    The effective sample size (Kong, 1992) is a quotient of sums, so it is computed here: (sum w)^2 / (n sum w^2), as a
    fraction of the n trained tokens; 0 if no token was kept. With several losses, learner and sampler are compared
    where a loss does.
    """
    update = dict(metrics)
    if COMPARED in update:
        share = float(update.pop(COMPARED))
        update |= {name: float(update[name]) / share if share else 0.0 for name in MISMATCH_METRICS}
    if WEIGHT_MOMENTS[0] in update:
        mean, square = (float(update.pop(name)) for name in WEIGHT_MOMENTS)
        update[EFFECTIVE_SAMPLES] = mean * mean / square if square else 0.0
    return update


def policy_metrics(
    config: LossConfig, *others: LossConfig, reference: bool = False, teacher: bool = False
) -> tuple[str, ...]:
    """Names of the metrics of `policy_loss`, for batches with or without log-probabilities of other models."""
    if others:
        each = (policy_metrics(loss, reference=reference, teacher=teacher) for loss in (config, *others))
        return (*dict.fromkeys(chain.from_iterable(each)), COMPARED)
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
    if config.rejections:
        names += tuple(f"rejection/{level}_mean" for level in config.rejections)
    if config.recipe.importance_sampling != "none" or config.rejections:
        names += WEIGHT_MOMENTS
    if config.sequence_mask_limit:
        names += ("sequence_mask/masked_mean",)
    if in_pairs(config):
        names += (PAIR_ACCURACY,)
    if reference:
        names += ("kl/mean",)
    return (*names, "distillation/kl_mean") if teacher else names


def _check_known(kind: str, name: str, known: Iterable[str], group: str) -> None:
    if name not in known and not is_plug_in(name, group):
        raise ConfigurationError(
            f"there is no {kind} {name!r}; use {', '.join(known)}, an entry point of {group}, or your own as "
            "package.module:name or path/to/file.py:name"
        )
