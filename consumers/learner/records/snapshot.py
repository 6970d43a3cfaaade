"""Snapshots of parameters in the memory of the host, in the dtype they are published in.

Rounding happens where the parameters lie, so half the bytes leave the devices, and the host never holds them in
float32. A snapshot shares no memory with the parameters, whose buffers the next step reuses.
"""

from collections import deque
from collections.abc import Container, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

_AHEAD = 2
"""Tensors whose copies are under way while the host takes one."""
HELD = _AHEAD + 1
"""Tensors that are whole on each device at a time, beside the parameters."""


def snapshot(
    params: Mapping[str, jax.Array], dtype: str = "", *, keep: Container[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Copy whole parameters to the host, those of float32 rounded to bfloat16 if that is the `dtype`.

    All processes that share them call it together, whatever the sharding. Each gets those that it is to `keep`, by
    default all; the others never leave its devices, which hold a few of them at a time beside the parameters.
    Rounding is that of `weights.conversion.converted`, in every bit; other dtypes are left for that function.
    """
    copies: dict[str, NDArray[Any]] = {}
    waiting: deque[tuple[str, jax.Array, bool]] = deque()
    for name, value in params.items():
        copy = _copying(value.sharding, dtype == "bfloat16" and value.dtype == jnp.float32)(value)
        kept = keep is None or name in keep
        if kept and copy.is_fully_addressable:
            copy.copy_to_host_async()
        waiting.append((name, copy, kept))
        if len(waiting) > _AHEAD:
            _take(copies, *waiting.popleft())
    while waiting:
        _take(copies, *waiting.popleft())
    return copies


def _take(copies: dict[str, NDArray[Any]], name: str, copy: jax.Array, kept: bool) -> None:
    if kept:
        # Without another copy where host and device have one memory: nothing else refers to this one.
        copies[name] = np.asarray(copy if copy.is_fully_addressable else copy.addressable_data(0))
    else:
        copy.block_until_ready()


@cache
def _copying(sharding: Sharding, rounds: bool) -> "jax.stages.Wrapped":
    """The compiled copy of tensors of a sharding; where several processes share them, every process gets all."""
    copying = _rounded if rounds else jnp.copy
    if isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable:
        return jax.jit(copying, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))  # type: ignore[no-untyped-call]
    return jax.jit(copying)


def _rounded(values: jax.Array) -> jax.Array:
    """Return float32 values in bfloat16, to the nearest, ties to even.

    With integers, because conversions of devices may flush subnormal numbers to zero.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    nearest = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) >> 16
    not_a_number = ((bits >> 16) & jnp.uint32(0x8000)) | jnp.uint32(0x7FC0)
    is_number = (bits & jnp.uint32(0x7FFFFFFF)) <= jnp.uint32(0x7F800000)
    rounded = jnp.where(is_number, nearest, not_a_number).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(rounded, jnp.bfloat16)
