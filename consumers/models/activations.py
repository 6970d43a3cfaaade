"""Sharding of activations on a learner's mesh: rows split over data and fsdp, independent of the parameters.

Without it the compiler may follow the sharding of the parameters, and move activations instead of parameters.
"""

import jax
from jax.sharding import PartitionSpec

ROW_AXES = ("data", "fsdp")


def split_rows(x: jax.Array, *, columns: bool = False) -> jax.Array:
    """Split `x` [rows, ...] over its rows and, with `columns`, its last dimension over `tensor` if that divides it.

    Returns `x` unchanged unless a mesh of several devices is set (jax.sharding.use_abstract_mesh).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or any(axis not in mesh.shape for axis in ROW_AXES):
        return x
    split = columns and x.shape[-1] % mesh.shape.get("tensor", 1) == 0
    last = "tensor" if split and "tensor" in mesh.shape else None
    spec = PartitionSpec(ROW_AXES, *[None] * (x.ndim - 2), last)  # type: ignore[no-untyped-call]
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return constrained
