"""Settings of the objective and of the optimizer, and what follows from them before anything is computed; no JAX."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The clipped policy-gradient loss."""

    clip_low: float = 0.2
    """Ratios below 1 - clip_low earn no more for negative advantages (PPO, arXiv:1707.06347)."""
    clip_high: float = 0.28
    """Ratios above 1 + clip_high earn no more for positive advantages (clip-higher of DAPO, arXiv:2503.14476)."""
    ratio_cap: float = 2.0
    """Ratios above this are not pushed down further for negative advantages (dual clip, arXiv:1912.09729)."""
    entropy_coefficient: float = 0.005
    """Weight of the mean token entropy that is added to the objective."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with global-norm clipping and a cosine schedule."""

    learning_rate: float = 2e-3
    """At the first step."""
    final_learning_rate: float = 4e-4
    """At `max_steps` and after."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""


def token_weight(config: LossConfig, trained_tokens: int) -> float:
    """Weight of each trained token's loss in a sequence with `trained_tokens` of them, at least 1."""
    return 1.0


def denominator_of(config: LossConfig) -> Literal["tokens", "sequences"]:
    """What the sum of weighted token losses is divided by: trained tokens, or sequences that have any."""
    return "tokens"


def trains(config: LossConfig, truncated: bool) -> bool:
    """Whether the tokens of a rollout, `truncated` or not, are trained at all."""
    return True


def needs_proximal(config: LossConfig, updates_per_step: int) -> bool:
    """Whether a step of several updates must compute log-probabilities before the first (`proximal_log_probs`)."""
    return False


def needs_reference(config: LossConfig) -> bool:
    """Whether the loss cannot do without `reference_log_probs`."""
    return False


def policy_metrics(config: LossConfig, *, reference: bool = False) -> tuple[str, ...]:
    """Names of the metrics of `policy_loss`, where its batches have `reference_log_probs` or not."""
    return (
        "loss",
        "entropy/mean",
        "mismatch_kl/mean",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/cap_mean",
    )
