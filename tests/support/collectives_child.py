"""Prints the collective operations of compiled gradients: `python -m tests.support.collectives_child JSON`.

Compiles for the CPU devices that XLA_FLAGS asks for, or for a TPU topology that this machine does not have.
"""

import json
import re
import sys
from dataclasses import dataclass, replace

import jax
import msgspec
from jax.experimental import topologies

from rollstream.consumers.learner.config import LearnerConfig, MeshConfig
from rollstream.consumers.learner.parallel.mesh import build_mesh
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models.config import DecoderConfig

CONFIG = LearnerConfig(
    model=DecoderConfig(
        vocab_size=512,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1024,
        num_hidden_layers=2,
    ),
    compute_dtype="bfloat16",
    microbatch_rows=8,
    sequence_length=32,
    layers="scanned",
)
"""Layers are scanned; matrices are large enough for the compiler of TPUs to scatter them."""
LARGEST_SMALL = 512
"""Values of the largest array that is no matrix."""
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_SCATTERED = re.compile(r"stablehlo.reduce_scatter.*?\}\) : \(tensor<[\dx]*x(\w+)>\)", re.DOTALL)


@dataclass(frozen=True)
class Job:
    """Meshes to compile for."""

    meshes: list[list[int]]
    """data, fsdp and tensor of each."""
    topology: str = ""
    """A TPU topology; empty: the devices of this process."""
    reduce_dtype: str = "compute"


def main() -> None:
    """Print for each mesh the reductions of the compiled gradient, and the dtypes that its program scatters."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=job.topology).devices if job.topology else None
    collected = []
    for data, fsdp, tensor in job.meshes:
        sizes = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
        config = replace(CONFIG, mesh=sizes, reduce_dtype=job.reduce_dtype)
        step = TrainStep(config, build_mesh(sizes, devices))
        lowered = next(function for name, function in step.lower().items() if name.startswith("gradient"))
        reductions = [
            (operation, dtype, [int(size) for size in shape.split(",") if size])
            for results, operation in _COLLECTIVE.findall(lowered.compile().as_text() or "")
            for dtype, shape in _ARRAY.findall(results)
        ]
        collected.append({"reductions": reductions, "scattered": sorted(set(_SCATTERED.findall(lowered.as_text())))})
    print(json.dumps(collected))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
