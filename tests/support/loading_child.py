"""A learner's process for tests: `python -m tests.support.loading_child JSON` loads its share of a checkpoint.

It prints the memory that this took.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import msgspec

from rollstream.consumers.learner.config import LearnerConfig, MeshConfig
from rollstream.consumers.learner.parallel import mesh as layout
from rollstream.consumers.learner.pretrained import initial_params, resolved
from rollstream.consumers.learner.training.snapshot import device_checksum
from rollstream.consumers.models.parameters import shapes

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class Job:
    """A process of a team that shares the parameters of a checkpoint evenly."""

    directory: str
    process: int
    processes: int
    coordinator: str


def memory(name: str) -> int:
    """Bytes that /proc/self/status gives under a name."""
    return next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith(name))


def main() -> None:
    """Do the job given as JSON."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    jax.distributed.initialize(job.coordinator, job.processes, job.process)
    sizes = MeshConfig(fsdp=job.processes)
    config = resolved(LearnerConfig(pretrained=job.directory, mesh=sizes, processes=job.processes))
    wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes(config.model).items()}
    shardings = layout.of_params(layout.build_mesh(sizes), wanted)
    jax.block_until_ready(jax.device_put(0))
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = memory("VmRSS")
    params = initial_params(job.directory, config.model, shardings)
    jax.block_until_ready(params)
    peak = memory("VmHWM") - before
    held = sum(shard.data.nbytes for value in params.values() for shard in value.addressable_shards)
    print(json.dumps({"peak_bytes": peak, "held_bytes": held, "digest": device_checksum(params)}))


if __name__ == "__main__":
    main()
