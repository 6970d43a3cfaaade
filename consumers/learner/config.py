"""Settings of the learner, without JAX. The defaults are the recipe that trains the demo's model.

Of the recipe: RLOO advantages over the group's standard deviation, PPO clipping with separate bounds, a format warm
start, AdamW with a cosine schedule.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from consumers.learner.checkpoint_paths import is_remote
from consumers.learner.objective import LossConfig, OptimizerConfig, needs_reference
from consumers.learner.sinks_config import SinksConfig
from consumers.models.config import DecoderConfig
from consumers.weights.config import WeightsConfig
from topics.errors import ConfigurationError

_LARGEST_ADVANTAGE = 1e4
"""Times the largest ratio e^20, over the lowest temperature 0.01: its square is still finite in float32."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps before version 0, on examples the environment provides (it teaches format, not the task)."""

    steps: int = 60
    """Updates; 0 turns the warm start off."""
    file: str = ""
    """JSON lines of examples: prompt and answer, or tokens and loss_mask. Empty: those of the task."""
    sequences_per_step: int = 128
    """Examples in one update, drawn with replacement from those given."""
    learning_rate: float = 2e-3
    """Of an AdamW that is thrown away afterwards; where it is not set and learner.pretrained is, 1e-5."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where and how often the learner's state is saved."""

    directory: str = ".rollstream/checkpoints"
    """Holds one folder per run and learner name: on a local or mounted file system, or at gs://BUCKET/FOLDER."""
    every_steps: int = 20
    """Steps between checkpoints; one is also saved at step 0 and on a clean stop."""
    keep: int = 3
    """Checkpoints kept."""

    def __post_init__(self) -> None:
        is_remote(self.directory)  # refuses a URL that nothing can be written to


@dataclass(frozen=True, kw_only=True)
class RolloutBufferConfig:
    """What `learner.source = "rollout_buffer"` draws the rollouts of a step from."""

    capacity: int = 4096
    """Rollouts of one environment that are held; the newest stay."""
    alpha: float = 3.0
    """Exponent of recency: of n rollouts of an environment number i, the oldest being 0, weighs (i + 1)**alpha."""
    max_samples: int = 1
    """Steps that train on a rollout before it is retired; negative: as often as it is drawn."""
    max_rollout_step_delay: int = 4
    """Steps the lowest policy version of a rollout may be old; negative: however old."""
    max_rollout_timestamp_delay: float = 3600.0
    """Seconds of stream time at which a rollout is too old; negative: however old."""
    balanced: bool = False
    """Draw from every environment alike; else in proportion to what is held of each."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigurationError(f"learner.buffer.capacity is {self.capacity}; it must be at least 1")
        if self.max_samples == 0:
            raise ConfigurationError(
                "learner.buffer.max_samples is 0, which trains on nothing; give at least 1, or -1 for no limit"
            )
        if not math.isfinite(self.alpha):
            raise ConfigurationError(f"learner.buffer.alpha is {self.alpha}; give a finite number, 0 for no recency")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the devices of all processes are laid out; data x fsdp x tensor is their number."""

    data: int = 0
    """Copies of the parameters, each training on its share of the rows; 0 takes the devices the other axes leave."""
    fsdp: int = 1
    """Devices the parameters and the optimizer's state are split over; each also trains on its share of the rows."""
    tensor: int = 1
    """Devices each matrix product is split over (Megatron, arXiv:1909.08053)."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """One learner: what it trains on, how, and how long."""

    name: str = "default"
    """Identity of the learner within its run; a second one of the same name fences the first."""
    take_over: bool = False
    """Publish into the run where a learner of another name did so last, and fence it; otherwise that is refused."""
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
    source: Literal["batches", "rollout_buffer"] = "batches"
    """Where a step's rollouts come from: the batches of `input_run` in index order, or a buffer of their rollouts."""
    buffer: RolloutBufferConfig = field(default_factory=RolloutBufferConfig)
    """The rollout buffer; `max_policy_lag` then limits what workers may produce and no longer what is trained on."""
    epochs: int = 1
    """How often a step goes through its rollouts."""
    minibatches: int = 1
    """Optimizer updates in one such pass, each on its share of the rollouts."""
    microbatch_rows: int = 40
    """Rows of one packed microbatch at `sequence_length`; as many microbatches as needed make an update."""
    sequence_length: int = 64
    """Tokens of a packed row."""
    length_buckets: tuple[int, ...] = ()
    """Up to two shorter row lengths beside sequence_length, for rollouts that fit; each is compiled once."""
    too_long: Literal["refuse", "skip", "truncate", "error"] = "refuse"
    """A rollout longer than sequence_length: "refuse" to start where some will be, and leave out what comes all the
    same; "skip" leaves them out, on record; "truncate" cuts them at the end; "error" ends the learner."""
    advantage_limit: float = 100.0
    """A rollout with an advantage beyond this, either way, is left out on record: no reward alone turns a step."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and of the parameters' copies in a step; masters and the optimizer are float32."""
    remat: bool = False
    """Compute a block's activations again in the backward pass rather than keep them."""
    vocabulary_chunk: int = 0
    """Vocabulary entries whose logits are held at once, so that [rows, tokens, vocabulary] never is; 0 takes all."""
    attention: Literal["auto", "plain", "blocks", "splash"] = "auto"
    """How attention is computed: auto holds scores [tokens, tokens] for short rows only; splash is the TPU's."""
    pretrained: str = ""
    """Directory of a Hugging Face checkpoint (config.json, safetensors, tokenizer.json) the run starts from."""
    reference: str = ""
    """What the KL term compares with: "carried" log-probabilities, the "initial" parameters, or such a directory."""
    processes: int = 1
    """Processes of this learner; they train together, and number 0 leads."""
    coordinator: str = ""
    """host:port where the lead coordinates them; where it is empty a supervised run takes a free port."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Layout of the devices."""
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
    sinks: SinksConfig = field(default_factory=SinksConfig)
    """Copies of each step's figures, besides the log."""

    def __post_init__(self) -> None:
        counts = {
            "rollouts_per_step": self.rollouts_per_step,
            "publish_every_steps": self.publish_every_steps,
            "epochs": self.epochs,
            "minibatches": self.minibatches,
            "microbatch_rows": self.microbatch_rows,
            "sequence_length": self.sequence_length,
            "threads": self.threads,
            "processes": self.processes,
            "checkpoint.every_steps": self.checkpoint.every_steps,
            "checkpoint.keep": self.checkpoint.keep,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigurationError(f"learner.{name} is {value}; it must be at least 1")
        if self.source == "rollout_buffer" and self.buffer.capacity < self.rollouts_per_step:
            raise ConfigurationError(
                f"learner.buffer.capacity {self.buffer.capacity} holds fewer than the learner.rollouts_per_step "
                f"{self.rollouts_per_step} a step draws; raise the one or lower the other"
            )
        if not 0 < self.advantage_limit <= _LARGEST_ADVANTAGE:
            raise ConfigurationError(
                f"learner.advantage_limit is {self.advantage_limit}; give more than 0 and at most "
                f"{_LARGEST_ADVANTAGE:g}, and scale larger rewards down: gradients are float32"
            )
        if needs_reference(self.loss) and not self.reference:
            raise ConfigurationError(
                f"learner.loss.kl_coefficient is {self.loss.kl_coefficient}, but there is no reference; "
                'set learner.reference to "initial", a directory or "carried", or kl_coefficient to 0'
            )
        if len(self.length_buckets) > 2 or any(not 0 < length < self.sequence_length for length in self.length_buckets):
            raise ConfigurationError(
                f"learner.length_buckets {list(self.length_buckets)}: give at most two lengths, each below "
                f"sequence_length {self.sequence_length}"
            )
