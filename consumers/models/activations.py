"""Where activations lie on a learner's mesh: their rows split over data and fsdp, whatever the parameters' split is.

Without this the compiler may follow the parameters instead, and move activations where it should gather parameters.
"""

import jax
from jax.sharding import PartitionSpec

ROW_AXES = ("data", "fsdp")


def split_rows(x: jax.Array, *, columns: bool = False) -> jax.Array:
    """`x` [rows, ...] split over its rows and, for `columns`, over `tensor` along its last dimension where that fits.

    As it is where no mesh of more than one device is set (jax.sharding.use_abstract_mesh).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or any(axis not in mesh.shape for axis in ROW_AXES):
        return x
    split = columns and x.shape[-1] % mesh.shape.get("tensor", 1) == 0
    last = "tensor" if split and "tensor" in mesh.shape else None
    spec = PartitionSpec(ROW_AXES, *[None] * (x.ndim - 2), last)  # type: ignore[no-untyped-call]
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return constrained
