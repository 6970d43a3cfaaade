"""How a learner's devices are laid out, and where each array of a training step lies on them.

Along `data` are copies of the parameters, along `fsdp` shares of them; the rows of a microbatch are split over both.
Along `tensor` each matrix product is split.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from consumers.learner.config import MeshConfig
from consumers.models import decoder
from topics.errors import ConfigurationError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all `devices`, by default those of all processes.

    Raises ConfigurationError where the axes do not multiply to the number of devices, or where processes would have to
    share rows, which each packs for itself.
    """
    devices = jax.devices() if devices is None else devices
    split = config.fsdp * config.tensor
    shape = (config.data or max(1, len(devices) // split), config.fsdp, config.tensor)
    if np.prod(shape) != len(devices):
        raise ConfigurationError(
            f"learner.mesh lays out data {shape[0]} x fsdp {shape[1]} x tensor {shape[2]} = {np.prod(shape)} devices, "
            f"but there are {len(devices)} ({_kinds(devices)}); change it, or the devices each process sees"
        )
    # In the order that suits the network between them, unless processes would have to share rows.
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * 3, devices=devices)
    if not _processes_have_rows_of_their_own(mesh):
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.array(ordered).reshape(shape), AXES)
    if not _processes_have_rows_of_their_own(mesh):
        raise ConfigurationError(
            f"learner.mesh.tensor {config.tensor} spans processes; let it divide the devices of each process"
        )
    return mesh


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """Devices along each axis, by name."""
    return dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))


def row_shares(mesh: Mesh) -> int:
    """Shares that the rows of a microbatch are split into: their number must be a multiple of it."""
    sizes = axis_sizes(mesh)
    return sizes["data"] * sizes["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def of_rows(mesh: Mesh) -> NamedSharding:
    """The first dimension split over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))  # type: ignore[no-untyped-call]


def of_params(mesh: Mesh, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
    """Of each parameter; `shapes` are arrays or anything else with a shape, by name."""
    specs = decoder.pspecs(shapes, axis_sizes(mesh))
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def of_optimizer(mesh: Mesh, shapes: Mapping[str, Any], optimizer_shapes: Any) -> Any:
    """Of each leaf of an optimizer's state: as the parameter whose name and shape it has, else a copy everywhere."""
    params = of_params(mesh, shapes)

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), None)
        return params[name] if name in params and shapes[name].shape == leaf.shape else replicated(mesh)

    return jax.tree_util.tree_map_with_path(of, optimizer_shapes)


def _processes_have_rows_of_their_own(mesh: Mesh) -> bool:
    owners: dict[int, set[int]] = {}
    for share, devices in enumerate(mesh.devices.reshape(row_shares(mesh), -1)):
        owners[share] = {device.process_index for device in devices}
    return all(len(processes) == 1 for processes in owners.values())


def _kinds(devices: Sequence[jax.Device]) -> str:
    counts = Counter(device.device_kind for device in devices)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())
