"""Settings of the learner; imports no JAX. The defaults train the model of the demo.

They are PPO clipping with separate bounds, a warm start that teaches the answer format, and AdamW with a cosine
schedule. Grouping computes the advantages (grouping.estimator).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from rollstream.consumers.learner.checkpoint_paths import check_learner_name, is_remote
from rollstream.consumers.learner.objective import (
    LossConfig,
    OptimizerConfig,
    beside,
    in_pairs,
    needs_reference,
    needs_teacher,
)
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.topics.errors import ConfigurationError

_LARGEST_ADVANTAGE = 1e4
"""Largest `advantage_limit`: multiplied by the largest ratio e^20, divided by the lowest temperature 0.01, and squared,
it is still finite in float32."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised updates before version 0, on examples from the environment: they teach the format, not the task."""

    steps: int = 60
    """Number of updates; 0 turns the warm start off. 0 if this is unset, learner.pretrained is set or
    supervisor.workers is 0, and neither `task`, `environments` nor learner.warm_start.file is set."""
    file: str = ""
    """JSON lines of examples: prompt and answer, or tokens and loss_mask. Empty: the examples of the task."""
    sequences_per_step: int = 128
    """Examples in one update, drawn with replacement."""
    learning_rate: float = 2e-3
    """Learning rate of AdamW in the warm start; 1e-5 if this is unset and learner.pretrained is set."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Directory and frequency of the learner's checkpoints."""

    directory: str = ".rollstream/checkpoints"
    """Directory with one folder for each run and learner: on a local or mounted file system, or gs://BUCKET/FOLDER."""
    every_steps: int = 20
    """Steps between checkpoints; a checkpoint is also saved at step 0 and on a clean stop."""
    keep: int = 3
    """Number of checkpoints kept."""

    def __post_init__(self) -> None:
        is_remote(self.directory)  # Raises for a URL that cannot be written to.


@dataclass(frozen=True, kw_only=True)
class RolloutBufferConfig:
    """The rollout buffer of `learner.source = "rollout_buffer"`."""

    capacity: int = 4096
    """Maximum number of rollouts held for each environment; the newest are kept."""
    alpha: float = 3.0
    """Exponent of recency: rollout i of an environment, where the oldest is 0, has weight (i + 1)**alpha."""
    max_samples: int = 1
    """Number of steps that train on a rollout before it is retired; negative: no limit."""
    max_rollout_step_delay: int = 4
    """Highest age of a rollout in steps, counted from its weight step or, if it has none, from the step of its lowest
    policy version; negative: no limit."""
    max_rollout_timestamp_delay: float = 3600.0
    """Seconds of stream time after which a rollout is too old; negative: no limit."""
    balanced: bool = False
    """Draw equally from all environments; otherwise in proportion to the number of rollouts held for each."""

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
    """Mesh of the devices of all processes; data x fsdp x sequence x tensor is the number of devices."""

    data: int = 0
    """Copies of the parameters, each trained on its share of the rows; 0 uses the devices left by the other axes."""
    fsdp: int = 1
    """Devices that share the parameters and the optimizer's state; each also trains on its share of the rows."""
    tensor: int = 1
    """Devices that share each matrix product (Megatron, arXiv:1909.08053)."""
    sequence: int = 1
    """Devices that share the tokens of each row, for rows whose activations are too large for one device; attention
    gathers keys and values. Row lengths must be multiples of this number."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Settings of one learner."""

    name: str = "default"
    """Name of the learner within its run; a second learner of the same name fences the first."""
    take_over: bool = False
    """Publish into a run even if a learner of another name published last, and fence that learner; otherwise refuse."""
    input_run: str = ""
    """Run whose batches are read; empty: the learner's own run."""
    seed: int = 0
    """Seed of the initial parameters and of the draws of the warm start."""
    rollouts_per_step: int = 256
    """A step takes whole batches in index order until it has at least this many rollouts."""
    max_steps: int = 600
    """Last step of the learner; also the length of the learning-rate schedule."""
    max_policy_lag: int = 4
    """Highest age in steps of the lowest policy version of a batch; an older batch is recorded as skipped."""
    publish_every_steps: int = 1
    """Steps between published policy versions; at most `max_policy_lag` + 1, because older rollouts are not trained on
    (with a rollout buffer, `buffer.max_rollout_step_delay` + 1)."""
    source: Literal["batches", "rollout_buffer"] = "batches"
    """Source of the rollouts of a step: the batches of `input_run` in index order, or a buffer of their rollouts."""
    buffer: RolloutBufferConfig = field(default_factory=RolloutBufferConfig)
    """The rollout buffer. With it, `max_policy_lag` limits only production by workers, not training."""
    epochs: int = 1
    """Passes of a step over its rollouts."""
    minibatches: int = 1
    """Optimizer updates in one pass, each on its share of the rollouts."""
    microbatch_rows: int = 40
    """Rows of one packed microbatch at `sequence_length`; an update has as many microbatches as it needs."""
    sequence_length: int = 64
    """Tokens of a packed row."""
    length_buckets: tuple[int, ...] = ()
    """Up to two shorter row lengths, for rollouts that fit; each length is compiled once."""
    too_long: Literal["refuse", "skip", "truncate", "error"] = "refuse"
    """Handling of rollouts longer than sequence_length: "refuse" refuses to start if the settings allow such rollouts,
    and leaves out any that arrive nevertheless; "skip" leaves them out and records this; "truncate" cuts them at the
    end; "error" ends the learner."""
    advantage_limit: float = 100.0
    """Highest absolute advantage; a rollout beyond it is recorded as left out. Prefer grouping.bounds with the range of
    rewards of your environment: it is tighter, and applies before a reward affects the baseline of its group."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and of the parameter copies in a step; master parameters and optimizer are float32."""
    reduce_dtype: Literal["compute", "float32"] = "compute"
    """Dtype in which gradients are summed over devices: "compute" is compute_dtype; "float32" moves twice the bytes of
    bfloat16 but rounds no sum."""
    remat: bool = False
    """Recompute the activations of a block in the backward pass instead of keeping them."""
    vocabulary_chunk: int = 0
    """Vocabulary entries whose logits are held at once, to avoid an array [rows, tokens, vocabulary]; 0 holds all."""
    attention: Literal["auto", "plain", "blocks", "splash"] = "auto"
    """Implementation of attention: auto holds scores [tokens, tokens] only for short rows; splash is for TPUs."""
    layers: Literal["auto", "unrolled", "scanned"] = "auto"
    """Compilation of the layers: scanned compiles one program for all layers, and copies their parameters in each step;
    auto scans a model of more than four layers."""
    routing_replay: bool = True
    """Whether a model with experts computes each token with the experts that its rollout names, if it names any, and
    lets the router only weigh them; otherwise the router chooses anew."""
    pretrained: str = ""
    """Directory of the Hugging Face checkpoint (config.json, safetensors, tokenizer.json) that the run starts from. A
    LearnerConfig made in code keeps the default learning rates, which suit the small model: set them too."""
    reference: str = ""
    """Reference of the KL term and of dpo: "carried" log-probabilities, the "initial" parameters, or a checkpoint
    directory."""
    teacher: str = ""
    """Directory of the teacher's Hugging Face checkpoint, for distillation (learner.loss.distillation_coefficient); any
    supported model with the vocabulary of the policy."""
    processes: int = 1
    """Processes of this learner, which train together; process 0 leads."""
    coordinator: str = ""
    """host:port at which the lead coordinates the processes; if empty, a supervised run chooses a free port."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the devices."""
    compile_cache: str = ""
    """Directory of compiled programs. A learner restarted on the same software and devices reads them instead of
    compiling; empty: cache/jax in data_dir. JAX_COMPILATION_CACHE_DIR in the environment takes precedence."""
    replay_tolerance: float = -1.0
    """Largest relative difference of loss, entropy and gradient norm by which a step executed again may differ from its
    record under the same settings; 0 requires the same bits; negative: 0.001 on GPUs, 0 elsewhere."""
    threads: int = 2
    """CPU threads of XLA (NPROC), set before JAX is imported; another number changes the last bits of results."""
    model: DecoderConfig = field(default_factory=DecoderConfig)
    """Shape of the policy."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""
    losses: tuple[str, ...] = ()
    """Losses of single environments, as ENVIRONMENT=LOSS, e.g. chats=ce; all others have `loss`, whose reduction and
    other settings hold for each."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Supervised updates before version 0."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """Publication of policy versions."""

    def __post_init__(self) -> None:
        check_learner_name(self.name)
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
                f"learner.buffer.capacity {self.buffer.capacity} is below learner.rollouts_per_step "
                f"{self.rollouts_per_step}, which every step draws; raise the capacity or lower rollouts_per_step"
            )
        self._check_version_age()
        if not 0 < self.advantage_limit <= _LARGEST_ADVANTAGE:
            raise ConfigurationError(
                f"learner.advantage_limit is {self.advantage_limit}; give more than 0 and at most "
                f"{_LARGEST_ADVANTAGE:g}, because gradients are float32, and scale larger rewards down"
            )
        if needs_reference(self.loss) and not self.reference:
            reason = f"kl_coefficient is {self.loss.kl_coefficient}" if self.loss.kl_coefficient else 'name is "dpo"'
            raise ConfigurationError(
                f"learner.loss.{reason}, but there is no reference; set learner.reference to "
                '"initial", a directory or "carried"'
            )
        if in_pairs(self.loss) and (self.source != "batches" or self.too_long == "truncate"):
            raise ConfigurationError(
                f'learner.loss.name "dpo" needs whole pairs, but learner.source is "{self.source}" and '
                f'learner.too_long "{self.too_long}": use the source "batches", and too_long "refuse", "skip" or '
                '"error"'
            )
        if needs_teacher(self.loss) and not self.teacher:
            raise ConfigurationError(
                f"learner.loss.distillation_coefficient is {self.loss.distillation_coefficient}, but there is no "
                "teacher; set learner.teacher to a checkpoint directory, or distillation_coefficient to 0"
            )
        for text in self.losses:
            if not all(text.partition("=")):
                raise ConfigurationError(
                    f"learner.losses: {text!r} names no environment and its loss; write ENVIRONMENT=LOSS, e.g. chats=ce"
                )
        names = {self.loss.name, *(text.partition("=")[2] for text in self.losses)}
        if "dpo" in names and len(names) > 1:
            raise ConfigurationError(
                f'learner.losses {list(self.losses)} mixes "dpo" with other losses, but batches are pairs as a whole '
                'or not at all: train on pairs in a run of its own, with learner.loss.name "dpo" and without losses'
            )
        for name in names:
            beside(self.loss, name)  # Raises for an unknown name.
        if len(self.length_buckets) > 2 or any(not 0 < length < self.sequence_length for length in self.length_buckets):
            raise ConfigurationError(
                f"learner.length_buckets {list(self.length_buckets)}: give at most two lengths, each below "
                f"sequence_length {self.sequence_length}"
            )

    @cached_property
    def loss_of(self) -> Mapping[str, LossConfig]:
        """Loss of each environment in `losses`, and first, as "", of all others."""
        pairs = (text.partition("=") for text in (f"={self.loss.name}", *self.losses))
        losses = {environment: beside(self.loss, name) for environment, _equals, name in pairs}
        return losses if len(set(losses.values())) > 1 else {"": self.loss}

    @property
    def every_loss(self) -> tuple[LossConfig, ...]:
        """Every loss in use, each once; tokens of a microbatch name theirs by its place here."""
        return tuple(dict.fromkeys(self.loss_of.values()))

    @property
    def replays_routing(self) -> bool:
        """Whether the experts that rollouts name are forced."""
        return self.routing_replay and self.model.num_experts > 0

    def _check_version_age(self) -> None:
        """Raise ConfigurationError if the newest version gets too old to train on before the next one is published."""
        name, limit = "max_policy_lag", self.max_policy_lag
        if self.source == "rollout_buffer":
            name, limit = "buffer.max_rollout_step_delay", self.buffer.max_rollout_step_delay
            if limit < 0:
                return
        oldest = min(self.publish_every_steps, self.max_steps) - 1
        if oldest > limit and not self.input_run:
            raise ConfigurationError(
                f"learner.publish_every_steps is {self.publish_every_steps}, so rollouts of the newest version are up "
                f"to {oldest} steps old, but learner.{name} {limit} allows no more: no step could follow; publish at "
                f"least every {limit + 1} steps, or raise learner.{name} to {oldest}"
            )
