"""Sharding on a learner's mesh: rows and tokens of activations, and access to parameters that are split over devices.

Without the sharding of activations, the compiler may move activations to match the sharding of the parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

ROW_AXES = ("data", "fsdp")
SEQUENCE = "sequence"


def split_rows(x: jax.Array, *, columns: bool = False) -> jax.Array:
    """Split `x` over devices: rows over data and fsdp; tokens, if it is [rows, tokens, ...], over sequence; with
    `columns`, also the last dimension over tensor, if tensor divides it.

    Returns `x` unchanged unless a mesh of several devices is set (jax.sharding.use_abstract_mesh). Axes over which `x`
    is already split, within jax.shard_map, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or any(axis not in mesh.shape for axis in ROW_AXES):
        return x
    left = [axis for axis in mesh.shape if axis not in mesh.manual_axes]
    if not left:
        return x
    split = columns and "tensor" in left and x.shape[-1] % mesh.shape["tensor"] == 0
    rows = tuple(axis for axis in ROW_AXES if axis in left) or None
    middle: list[str | None] = [None] * (x.ndim - 2)
    if middle and sequence_parts(x.shape[1]) > 1:
        middle[0] = SEQUENCE
    spec = PartitionSpec(rows, *middle, "tensor" if split else None)  # type: ignore[no-untyped-call]
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return constrained


def sequence_parts(length: int) -> int:
    """Return the number of devices over which the compiler splits rows of `length` tokens; 1 if they are whole."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if SEQUENCE in mesh.manual_axes else int(mesh.shape.get(SEQUENCE, 1))
    return 1 if length % parts else parts


Params = Mapping[str, jax.Array]
Whole = Callable[[Params], Params]
"""Function that takes shares of parameters, and returns the whole parameters under the same names."""

GATHERED = "gathered"
"""Name of gathered parameters in checkpoint policies (jax.ad_checkpoint)."""


def as_given(params: Params) -> Params:
    """Return the parameters as they are, because they are whole."""
    return params


def keep_all_but_gathered(primitive: Any, *_avals: Any, **settings: Any) -> bool:
    """Checkpoint policy that keeps activations, and gathers parameters again in the backward pass.

    Transposed parameters are not kept either, because they are as large as the parameters.
    """
    return primitive.name != "transpose" and settings.get("name") != GATHERED
