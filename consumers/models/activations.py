"""Sharding of activations on a learner's mesh: rows split over data and fsdp, independent of the parameters.

Without it the compiler may follow the sharding of the parameters, and move activations instead of parameters.
"""

import jax
from jax.sharding import PartitionSpec

ROW_AXES = ("data", "fsdp")


def split_rows(x: jax.Array, *, columns: bool = False) -> jax.Array:
    """Split `x` [rows, ...] over its rows and, with `columns`, its last dimension over `tensor` if that divides it.

    Returns `x` unchanged unless a mesh of several devices is set (jax.sharding.use_abstract_mesh). Axes over which `x`
    is split already, within jax.shard_map, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or any(axis not in mesh.shape for axis in ROW_AXES):
        return x
    left = [axis for axis in mesh.shape if axis not in mesh.manual_axes]
    if not left:
        return x
    split = columns and "tensor" in left and x.shape[-1] % mesh.shape["tensor"] == 0
    rows = tuple(axis for axis in ROW_AXES if axis in left) or None
    spec = PartitionSpec(rows, *[None] * (x.ndim - 2), "tensor" if split else None)  # type: ignore[no-untyped-call]
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return constrained
