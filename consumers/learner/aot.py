"""Compiles a learner's training step for TPUs that are not here, and says what memory it takes on each of them.

The compiler is the real one, libtpu's, and the functions are those that `TrainStep` runs; nothing is executed.
"""

import importlib.util
import os
import time
from dataclasses import dataclass, replace
from typing import Any

from consumers.learner.config import LearnerConfig
from topics.errors import ConfigurationError

HBM_GIB = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v5p": 95, "TPU v6 lite": 32}
"""High-bandwidth memory of a chip by JAX's name of it."""

_ENVIRONMENT = {
    # The functions are compiled here and run nowhere: JAX need not look for a TPU, nor libtpu for its machine.
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_QUICK = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True, kw_only=True)
class CompiledFunction:
    """One function of the training step, on each device."""

    name: str
    """What it does and the shape of its microbatch."""
    seconds: float
    """Time it took to compile."""
    arguments_bytes: int
    """What it is given, buffers it may reuse among them."""
    temporaries_bytes: int
    """What it needs beside arguments and results."""
    peak_bytes: int
    """Most it holds at once, arguments and results among it."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a learner takes on each device."""

    device: str
    """JAX's name of the device."""
    devices: int
    """Their number."""
    processes: int
    """Hosts they belong to."""
    mesh: dict[str, int]
    """Devices along each axis."""
    parameters: int
    """Of the model."""
    state_bytes: int
    """Parameters and the optimizer's state."""
    peak_bytes: int
    """Most that is held at once: a function's peak with what lies beside it."""
    hbm_bytes: int | None
    """Memory of a device, None where it is not known."""
    functions: tuple[CompiledFunction, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the peak is below the device's memory, None where that is not known."""
        return None if self.hbm_bytes is None else self.peak_bytes < self.hbm_bytes


def compile_for(config: LearnerConfig, topology: str, *, quick: bool = True) -> Fit:
    """Compile the step for a TPU topology such as "v5e:2x4"; needs the extra `tpu`, and no TPU.

    `quick` has the compiler try less hard, which is several times faster; memory comes out about the same. Attention is
    splash where a learner on TPUs would choose it. Raises ConfigurationError where libtpu is missing, where it does not
    know the topology, and where a function does not fit into a device's memory by itself.
    """
    if not (importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
        raise ConfigurationError("compiling for TPUs needs libtpu: pip install 'rollstream[tpu]'")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    from consumers.learner.mesh import axis_sizes, build_mesh
    from consumers.learner.step import TrainStep

    try:
        devices: list[Any] = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(f"libtpu does not know the topology {topology!r}: {_first_line(error)}") from error
    step = TrainStep(replace(config, attention=_attention(config)), build_mesh(config.mesh, devices))
    functions = tuple(_compiled(name, lowered, _QUICK if quick else None) for name, lowered in step.lower().items())
    state = step.abstract_state()
    params, everything = _held_bytes(state.params), _held_bytes(state)
    frozen = params if config.reference not in ("", "carried") else 0
    # While gradients are computed, what the optimizer keeps lies beside them; a reference lies beside everything.
    beside = {function.name: 0 if function.name == "update" else everything - params for function in functions}
    kind = devices[0].device_kind
    return Fit(
        device=kind,
        devices=len(devices),
        processes=len({device.process_index for device in devices}),
        mesh=axis_sizes(step.mesh),
        parameters=sum(leaf.size for leaf in state.params.values()),
        state_bytes=everything,
        peak_bytes=frozen + max(function.peak_bytes + beside[function.name] for function in functions),
        hbm_bytes=HBM_GIB[kind] << 30 if kind in HBM_GIB else None,
        functions=functions,
    )


def _compiled(name: str, lowered: Any, options: dict[str, float] | None) -> CompiledFunction:
    import jax

    began = time.monotonic()
    try:
        analysis = lowered.compile(compiler_options=options).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigurationError(
            f"{name} does not fit into a device: {_first_line(error)}; split it over more devices (learner.mesh), give "
            "a microbatch fewer rows, set learner.remat or a learner.vocabulary_chunk"
        ) from error
    return CompiledFunction(
        name=name,
        seconds=round(time.monotonic() - began, 1),
        arguments_bytes=analysis.argument_size_in_bytes,
        temporaries_bytes=analysis.temp_size_in_bytes,
        peak_bytes=analysis.peak_memory_in_bytes,
    )


def _attention(config: LearnerConfig) -> Any:
    """What `auto` would choose on a TPU."""
    from consumers.models.attention import PLAIN_TOKENS

    lengths = (config.sequence_length, *config.length_buckets)
    kernel = config.sequence_length > PLAIN_TOKENS and not any(length % 128 for length in lengths)
    return "splash" if config.attention == "auto" and kernel else config.attention


def _held_bytes(abstract: Any) -> int:
    """Bytes of each device's share of arrays."""
    import jax
    import numpy as np

    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300]
