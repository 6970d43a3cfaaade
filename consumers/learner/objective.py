"""Settings of the objective and of the optimizer, without JAX."""

from dataclasses import dataclass


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
