"""A learner's process for tests: `python -m tests.support.mesh_child JSON` trains on given layouts of devices and
writes parameters and metrics to a file.

All layouts and all processes see the same rollouts, so that all of them should end with the same parameters.
"""

import json
import sys
from dataclasses import dataclass, replace
from typing import Literal

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from rollstream.consumers.learner.config import LearnerConfig, MeshConfig
from rollstream.consumers.learner.objective import OptimizerConfig
from rollstream.consumers.learner.parallel.mesh import build_mesh
from rollstream.consumers.learner.training.packing import PackedStep, TrainingSequence, pack_for
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models.config import DecoderConfig, LoraConfig
from rollstream.consumers.models.parameters import shapes

CONFIG = LearnerConfig(
    model=DecoderConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=1,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        qk_norm=False,
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    microbatch_rows=8,
    sequence_length=32,
    minibatches=2,
    max_steps=10,
)
ROLLOUTS = (60, 5, 1)
"""Rollouts of each step; the third leaves an update without any."""


@dataclass(frozen=True)
class Job:
    """Layouts that a child trains under, and the file it writes."""

    out: str
    layouts: list[list[int]]
    """data, fsdp, tensor and, if it is not 1, sequence of each mesh; one of fewer devices than there are takes the
    first ones."""
    process: int = 0
    processes: int = 1
    coordinator: str = ""
    lora_rank: int = 0
    """Rank of the adapters that are trained instead of the model."""
    experts: int = 0
    """Experts in each block, of which two compute a token."""
    attention: Literal["auto", "blocks"] = "auto"
    """Implementation of attention."""
    vocabulary_chunk: int = 0
    """Vocabulary entries whose logits are held at once."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward and backward pass."""


def rollouts(step: int) -> list[TrainingSequence]:
    """The rollouts of one step."""
    draw = np.random.default_rng(step)
    collected = []
    for _ in range(ROLLOUTS[step]):
        length = int(draw.integers(4, CONFIG.sequence_length))
        collected.append(
            TrainingSequence(
                tokens=draw.integers(0, CONFIG.model.vocab_size, length).astype(np.int32),
                loss_mask=np.arange(length) >= 3,
                advantages=np.full(length, draw.normal(), np.float32),
                generator_log_probs=draw.normal(-3.0, 0.2, length).astype(np.float32),
            )
        )
    return collected


def params(model: DecoderConfig) -> dict[str, np.ndarray]:
    """Parameters to begin with; drawn by numpy because that compiles nothing."""
    draw = np.random.default_rng(7)
    return {name: draw.normal(0.0, 0.2, shape).astype(np.float32) for name, shape in shapes(model).items()}


def _trained(train_step: TrainStep, name: str, steps: list[PackedStep]) -> dict[str, np.ndarray]:
    """Metrics of the steps, parameters after them, and the part of each that a device holds."""
    state, collected = train_step.fresh_state(params(train_step.config.model)), {}
    for number, step in enumerate(steps):
        state, metrics = train_step.train(state, step)
        collected[f"{name}/metrics/{number}"] = np.array(json.dumps(metrics))
    for key, value in state.params.items():
        whole = value if value.is_fully_addressable else multihost_utils.process_allgather(value, tiled=True)
        collected[f"{name}/params/{key}"] = np.asarray(whole)
        collected[f"{name}/held/{key}"] = np.array(value.addressable_shards[0].data.size / value.size)
    return collected


def main() -> None:
    """Do the job given as JSON."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    if job.processes > 1:
        jax.distributed.initialize(job.coordinator, job.processes, job.process)
    collected = {}
    for layout in job.layouts:
        sizes = MeshConfig(**dict(zip(("data", "fsdp", "tensor", "sequence"), layout, strict=False)))
        mixture = {"num_experts": job.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = replace(CONFIG.model, lora=LoraConfig(rank=job.lora_rank), **(mixture if job.experts else {}))
        config = replace(
            CONFIG,
            model=model,
            mesh=sizes,
            processes=job.processes,
            attention=job.attention,
            vocabulary_chunk=job.vocabulary_chunk,
            compute_dtype=job.compute_dtype,
        )
        train_step = TrainStep(config, build_mesh(sizes, jax.devices()[: int(np.prod(layout))]))
        train_step.warm_up(train_step.fresh_state(params(model)))
        compilations = train_step.compilations
        name = "x".join(str(size) for size in layout)
        collected |= _trained(train_step, name, [pack_for(config, rollouts(step)) for step in range(len(ROLLOUTS))])
        assert train_step.compilations == compilations, f"{name}: compiled in the steady state"
    np.savez(job.out, **collected)


if __name__ == "__main__":
    main()
