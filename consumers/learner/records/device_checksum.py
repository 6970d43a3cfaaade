"""Computes the digest of parameters on their devices: each device sums its shards and returns 16 bytes per tensor.

`topics.params_checksum` defines the digest.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rollstream.topics.records.arrays import dtype_name
from rollstream.topics.wire.params_digest import FACTORS, WORD_BYTES, checksum_digest, terms

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_WIDE: dict[str, Any] = {"xla_cpu_prefer_vector_width": 512}
"""By default XLA uses half the width of AVX-512 vectors; with the full width, sums take a third of the CPU time."""


def device_checksum(params: Mapping[str, jax.Array]) -> str:
    """Return the same digest as `params_checksum`; all processes that share the parameters call this together.

    Compiles once for each shape, dtype and sharding. Raises ValueError for values of more than four bytes.
    """
    # All sums are started before the first result is awaited.
    sums = {name: _summing(params[name].sharding)(params[name]) for name in sorted(params)}
    return checksum_digest(
        {
            name: (dtype_name(params[name].dtype), params[name].shape, tuple(map(int, np.asarray(total))))
            for name, total in sums.items()
        }
    )


@cache
def _summing(sharding: jax.sharding.Sharding) -> "jax.stages.Wrapped":
    """The compiled sum over tensors of a sharding; every process gets the result."""
    device: Any = next(iter(sharding.device_set))
    options = _WIDE if device.platform == "cpu" else None
    if isinstance(sharding, NamedSharding):
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        return jax.jit(_sums, out_shardings=everywhere, compiler_options=options)
    return jax.jit(_sums, compiler_options=options)


def _sums(tensor: jax.Array) -> jax.Array:
    if tensor.dtype.itemsize not in WORD_BYTES:
        raise ValueError(f"parameters of dtype {tensor.dtype} have no checksum on a device")
    words = jax.lax.bitcast_convert_type(tensor, _WORDS[tensor.dtype.itemsize]).astype(jnp.uint32)
    places, stride = jnp.zeros(tensor.shape, jnp.uint32), 1
    for axis in reversed(range(tensor.ndim)):
        places += jax.lax.broadcasted_iota(jnp.uint32, tensor.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= tensor.shape[axis]
    # One pass over the tensor: four separate sums take thirty times as long on a CPU.
    zeros = (jnp.uint32(0),) * len(FACTORS)
    add = partial(jax.tree.map, jnp.add)
    return jnp.stack(jax.lax.reduce(terms(words, places), zeros, add, tuple(range(tensor.ndim))))
