"""Compiles a learner's training step for absent TPUs and reports the memory it takes on each device.

libtpu compiles the functions that `TrainStep` runs; nothing is executed.
"""

import importlib.util
import os
import time
from dataclasses import dataclass, replace
from typing import Any

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.topics.errors import ConfigurationError

HBM_GIB = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v5p": 95, "TPU v6 lite": 32}
"""High-bandwidth memory of a chip, by JAX's name for it."""

_ENVIRONMENT = {
    # The functions are only compiled: JAX need not look for a TPU, and libtpu need not look for its host.
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
    """Purpose of the function, and the shape of its microbatch."""
    seconds: float
    """Time that compiling the function took."""
    arguments_bytes: int
    """Size of the arguments, including buffers that the function may reuse."""
    temporaries_bytes: int
    """Memory besides arguments and results."""
    peak_bytes: int
    """Peak memory, including arguments and results."""


@dataclass(frozen=True, kw_only=True)
class CompilationFit:
    """Memory of a learner on each device."""

    device: str
    """JAX's name of the device."""
    devices: int
    """Number of devices."""
    processes: int
    """Number of hosts."""
    mesh: dict[str, int]
    """Devices along each axis."""
    parameters: int
    """Number of parameters of the model."""
    state_bytes: int
    """Size of the parameters and the optimizer's state."""
    checkpoint_bytes: int
    """Size of the copy of the state that is held while a checkpoint is written and training goes on."""
    snapshot_bytes: int
    """Size of the whole tensors held while a version is copied to the hosts: between two steps or, on a single device,
    while the gradients of the next step are computed."""
    peak_bytes: int
    """Peak memory of a function or a snapshot, including all arrays held at the same time."""
    hbm_bytes: int | None
    """Memory of a device, None if it is unknown."""
    functions: tuple[CompiledFunction, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the peak is below the memory of the device, None if that is unknown."""
        return None if self.hbm_bytes is None else self.peak_bytes < self.hbm_bytes


def compile_for(config: LearnerConfig, topology: str, *, quick: bool = False) -> CompilationFit:
    """Compile the step for a TPU topology such as "v5e:2x4"; needs the extra `tpu`, but no TPU.

    `quick` lowers the compiler's optimization effort: it is several times faster and reports about the same memory.
    Attention is splash if a learner on TPUs would choose it. Raises ConfigurationError if libtpu is missing or does not
    know the topology, and if a single function exceeds the memory of a device.
    """
    if not (importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
        raise ConfigurationError("compiling for TPUs needs libtpu: pip install 'rollstream[tpu]'")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    from rollstream.consumers.learner.parallel.mesh import axis_sizes, build_mesh
    from rollstream.consumers.learner.training.train_step import TrainStep

    try:
        devices: list[Any] = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(f"libtpu does not know the topology {topology!r}: {_first_line(error)}") from error
    step = TrainStep(replace(config, attention=_attention(config)), build_mesh(config.mesh, devices))
    # JAX cannot read a function for absent devices back from its compile cache: none is written there.
    cached_from_s = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))  # type: ignore[no-untyped-call]
    try:
        functions = tuple(_compiled(name, lowered, _QUICK if quick else None) for name, lowered in step.lower().items())
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", cached_from_s)  # type: ignore[no-untyped-call]
    state = step.abstract_state()
    params, everything = _held_bytes(state.params), _held_bytes(state)
    frozen = params if config.reference not in ("", "carried") else 0
    frozen += _held_bytes(step.teacher.abstract_params) if step.teacher else 0
    hosts = {device.process_index for device in devices}
    snapshot = _snapshot_bytes(config, state.params, whole=len(hosts) > 1)
    # While gradient functions run, the state of the optimizer is held too, and on a single device a snapshot. While any
    # function runs, a reference and the copy of the state that a checkpoint is written from are held too.
    held = everything - params + (snapshot if len(devices) == 1 else 0)
    beside = {function.name: 0 if function.name == "update" else held for function in functions}
    kind = devices[0].device_kind
    return CompilationFit(
        device=kind,
        devices=len(devices),
        processes=len(hosts),
        mesh=axis_sizes(step.mesh),
        parameters=sum(leaf.size for leaf in state.params.values()),
        state_bytes=everything,
        checkpoint_bytes=everything,
        snapshot_bytes=snapshot,
        peak_bytes=frozen
        + everything
        + max(everything + snapshot, *(function.peak_bytes + beside[function.name] for function in functions)),
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
            f"{name} does not fit into the memory of a device: {_first_line(error)}; split it over more "
            "devices (learner.mesh), give a microbatch fewer rows, or set learner.remat or learner.vocabulary_chunk"
        ) from error
    return CompiledFunction(
        name=name,
        seconds=round(time.monotonic() - began, 1),
        arguments_bytes=analysis.argument_size_in_bytes,
        temporaries_bytes=analysis.temp_size_in_bytes,
        peak_bytes=analysis.peak_memory_in_bytes,
    )


def _attention(config: LearnerConfig) -> Any:
    """The implementation that `auto` chooses on a TPU."""
    from rollstream.consumers.models.attention import PLAIN_TOKENS

    lengths = (config.sequence_length, *config.length_buckets)
    kernel = config.sequence_length > PLAIN_TOKENS and not any(length % 128 for length in lengths)
    kernel &= config.mesh.sequence == 1
    return "splash" if config.attention == "auto" and kernel else config.attention


def _snapshot_bytes(config: LearnerConfig, params: dict[str, Any], *, whole: bool) -> int:
    """Bytes of the largest tensors that a snapshot holds on each device, in the published dtype.

    Tensors are `whole` if several hosts share them.
    """
    import numpy as np

    from rollstream.consumers.learner.pretrained import published_dtype
    from rollstream.consumers.learner.training.snapshot import HELD

    itemsize = 2 if published_dtype(config) == "bfloat16" else 4
    sizes = (leaf.size if whole else leaf.sharding.shard_shape(leaf.shape) for leaf in params.values())
    return sum(sorted(int(np.prod(size)) * itemsize for size in sizes)[-HELD:])


def _held_bytes(abstract: Any) -> int:
    """Bytes of arrays on each device."""
    import jax
    import numpy as np

    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300]
