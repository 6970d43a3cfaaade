"""The device mesh of a learner, and the sharding of each array of a training step.

The axis `data` holds copies of the parameters and `fsdp` shares of them; the rows of a microbatch are split over both.
The tokens of each row are split over `sequence`, and each matrix product over `tensor`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rollstream.consumers.learner.config import LearnerConfig, MeshConfig
from rollstream.consumers.models import decoder
from rollstream.topics.errors import ConfigurationError

AXES = ("data", "fsdp", "sequence", "tensor")
ROW_AXES = ("data", "fsdp")


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build a mesh of all `devices`, by default those of all processes.

    Raises ConfigurationError if the product of the axes is not the number of devices, or if processes would have to
    share rows, because each process packs its own rows.
    """
    devices = jax.devices() if devices is None else devices
    split = config.fsdp * config.sequence * config.tensor
    shape = (config.data or max(1, len(devices) // split), config.fsdp, config.sequence, config.tensor)
    if np.prod(shape) != len(devices):
        sizes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
        raise ConfigurationError(
            f"learner.mesh lays out {sizes} = {np.prod(shape)} devices, but there are {len(devices)} "
            f"({_kinds(devices)}); change learner.mesh, or the devices that each process sees"
        )
    # JAX orders devices by their network; use process order if processes would have to share rows.
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices)
    if not _each_row_has_one_process(mesh):
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.array(ordered).reshape(shape), AXES)
    if not _each_row_has_one_process(mesh):
        raise ConfigurationError(
            f"learner.mesh.sequence {config.sequence} x tensor {config.tensor} spans processes; choose them so that "
            "their product divides the number of devices of each process"
        )
    return mesh


def check_parts(config: LearnerConfig, lengths: Iterable[int]) -> None:
    """Raise ConfigurationError if these rows, or their attention, cannot be split over learner.mesh.sequence."""
    parts = config.mesh.sequence
    uneven = sorted(length for length in lengths if length % parts)
    if uneven:
        raise ConfigurationError(
            f"rows of {uneven[0]} tokens cannot be split evenly over learner.mesh.sequence = {parts}; make "
            f"learner.sequence_length and learner.length_buckets multiples of {parts}"
        )
    if parts > 1 and config.attention == "splash":
        raise ConfigurationError(
            f'learner.attention "splash" cannot be split over learner.mesh.sequence = {parts}; set it to "auto" or '
            '"blocks"'
        )


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """Devices along each axis, by name."""
    return dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))


def row_shares(mesh: Mesh) -> int:
    """Number of shares of the rows of a microbatch; the number of rows must be a multiple of it."""
    sizes = axis_sizes(mesh)
    return sizes["data"] * sizes["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding with a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def of_rows(mesh: Mesh) -> NamedSharding:
    """Sharding of the first dimension over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))  # type: ignore[no-untyped-call]


def of_params(mesh: Mesh, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
    """Sharding of each parameter; `shapes` are arrays or other objects with a shape, by name."""
    specs = decoder.pspecs(shapes, axis_sizes(mesh))
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def of_optimizer(mesh: Mesh, shapes: Mapping[str, Any], optimizer_shapes: Any) -> Any:
    """Sharding of each leaf of an optimizer's state: that of the parameter with its name and shape, or replicated."""
    params = of_params(mesh, shapes)

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), None)
        return params[name] if name in params and shapes[name].shape == leaf.shape else replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, optimizer_shapes)


def _each_row_has_one_process(mesh: Mesh) -> bool:
    owners: dict[int, set[int]] = {}
    for share, devices in enumerate(mesh.devices.reshape(row_shares(mesh), -1)):
        owners[share] = {device.process_index for device in devices}
    return all(len(processes) == 1 for processes in owners.values())


def _kinds(devices: Sequence[jax.Device]) -> str:
    counts = Counter(device.device_kind for device in devices)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())
