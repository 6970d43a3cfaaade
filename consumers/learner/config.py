"""Settings of the learner, without JAX. The defaults are the recipe that trains the demo's model.

Of the recipe: RLOO advantages over the group's standard deviation, PPO clipping with separate bounds, a format warm
start, AdamW with a cosine schedule.
"""

from dataclasses import dataclass, field

from consumers.models.config import DecoderConfig
from consumers.weights.config import WeightsConfig
from topics.errors import ConfigurationError


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


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps before version 0, on examples the environment provides (it teaches format, not the task)."""

    steps: int = 60
    """Updates; 0 turns the warm start off."""
    sequences_per_step: int = 128
    """Examples in one update, drawn with replacement from those given."""
    learning_rate: float = 2e-3
    """Of an AdamW that is thrown away afterwards."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where and how often the learner's state is saved."""

    directory: str = ".rollstream/checkpoints"
    """Holds one folder per learner name; local or any path orbax understands."""
    every_steps: int = 20
    """Steps between checkpoints; one is also saved at step 0 and on a clean stop."""
    keep: int = 3
    """Checkpoints kept."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """One learner: what it trains on, how, and how long."""

    name: str = "default"
    """Identity of the learner within its run; a second one of the same name fences the first."""
    input_run: str = ""
    """Run whose batches are read; empty: the learner's own run."""
    seed: int = 0
    """Of the initial parameters and of the warm start's draws."""
    rollouts_per_step: int = 256
    """A step takes whole batches in index order until it has at least this many rollouts."""
    max_steps: int = 600
    """The learner finishes after this step; also the length of the learning-rate schedule."""
    max_policy_lag: int = 4
    """A batch whose lowest policy version is more than this many steps old when reached is skipped, on record."""
    publish_every_steps: int = 1
    """Steps between published policy versions."""
    microbatch_rows: int = 40
    """Rows of one packed microbatch; as many microbatches as needed make a step."""
    sequence_length: int = 64
    """Tokens of a packed row; a longer rollout is an error that names this setting."""
    threads: int = 2
    """CPU threads of XLA (NPROC), set before JAX is imported: another number changes the last bits of a result."""
    model: DecoderConfig = field(default_factory=DecoderConfig)
    """Shape of the policy."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """What happens before version 0."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """Publication of policy versions."""

    def __post_init__(self) -> None:
        counts = {
            "rollouts_per_step": self.rollouts_per_step,
            "publish_every_steps": self.publish_every_steps,
            "microbatch_rows": self.microbatch_rows,
            "sequence_length": self.sequence_length,
            "threads": self.threads,
            "checkpoint.every_steps": self.checkpoint.every_steps,
            "checkpoint.keep": self.checkpoint.keep,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigurationError(f"learner.{name} is {value}; it must be at least 1")
