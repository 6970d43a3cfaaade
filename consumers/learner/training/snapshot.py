"""Snapshots of parameters in the memory of the host, in the dtype in which they are published, and their digests.

Parameters are rounded on their devices, so only half the bytes leave the devices, and the host never holds float32
copies. A snapshot shares no memory with the parameters, whose buffers the next step reuses, or with an earlier snapshot
that is still in use.

`topics.wire.params_digest` defines the digest, which devices compute over the part that each of them holds.
"""

import weakref
from collections import deque
from collections.abc import Container, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from rollstream.topics.records.arrays import dtype_name
from rollstream.topics.wire.params_digest import FACTORS, WORD_BYTES, checksum_digest, terms

_AHEAD = 2
"""Number of further tensors being copied while the host takes one."""
HELD = _AHEAD + 1
"""Number of whole tensors on each device at a time, in addition to the parameters."""


class Snapshots:
    """Snapshots of one learner, which reuse the memory of earlier snapshots if the device is the host.

    Allocating memory takes longer than filling it, and freed memory may stay with the process.
    """

    def __init__(self, dtype: str = "") -> None:
        """Round float32 parameters if `dtype` is bfloat16.

        The rounded values have the same bits as from `weights.conversion.converted`, which converts to other dtypes.
        """
        self._rounds = dtype == "bfloat16"
        self._memory: dict[str, list[_Copy]] = {}

    def take(self, params: Mapping[str, jax.Array], *, keep: Container[str] | None = None) -> dict[str, NDArray[Any]]:
        """Copy whole parameters to the host.

        All processes that share the parameters call this together, whatever the sharding. Each process gets the
        parameters named in `keep`, by default all; other parameters never leave its devices, which hold a few whole
        tensors at a time in addition to their shares.
        """
        copies: dict[str, NDArray[Any]] = {}
        waiting: deque[tuple[str, jax.Array, bool]] = deque()
        for name, value in params.items():
            rounds, kept = self._rounds and value.dtype == jnp.float32, keep is None or name in keep
            if rounds and kept and _on_host(value):
                copies[name] = self._rounded_into_memory(name, value)
                continue
            copy = _copying(value.sharding, rounds)(value)
            if kept and copy.is_fully_addressable:
                copy.copy_to_host_async()
            waiting.append((name, copy, kept))
            if len(waiting) > _AHEAD:
                _take(copies, *waiting.popleft())
        while waiting:
            _take(copies, *waiting.popleft())
        return {name: copies[name] for name in params if name in copies}

    def _rounded_into_memory(self, name: str, value: jax.Array) -> NDArray[Any]:
        """Round a tensor into the memory of an earlier copy that nothing refers to any more, or into new memory."""
        earlier = self._memory.setdefault(name, [])
        free = next((copy for copy in earlier if copy.free), None)
        if free is None:
            bits = _ROUNDED(value)
        else:
            earlier.remove(free)
            # If anything still referred to the old copy, JAX would allocate new memory.
            bits = _ROUNDED_INTO(value, free.bits)
        copy = _Copy(bits.block_until_ready())
        earlier.append(copy)
        return copy.shown()


class _Copy:
    """A rounded tensor in memory of JAX, with a record of whether a numpy array still refers to this memory."""

    def __init__(self, bits: jax.Array) -> None:
        self.bits = bits
        self._shown: weakref.ref[NDArray[Any]] | None = None

    @property
    def free(self) -> bool:
        """Whether the numpy array that `shown` made is gone, and with it every view of the array."""
        return self._shown is not None and self._shown() is None

    def shown(self) -> NDArray[Any]:
        """Return the tensor as a numpy array, without another copy."""
        bits: Any = self.bits
        array: NDArray[Any] = np.from_dlpack(bits)
        self._shown = weakref.ref(array)
        return array.view(jnp.bfloat16)


def snapshot(
    params: Mapping[str, jax.Array], dtype: str = "", *, keep: Container[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Take one snapshot, in new memory."""
    return Snapshots(dtype).take(params, keep=keep)


def _on_host(value: jax.Array) -> bool:
    """Whether the tensor is in the memory of the host, in one piece."""
    devices: Any = value.sharding.device_set
    return len(devices) == 1 and value.is_fully_addressable and all(device.platform == "cpu" for device in devices)


def _take(copies: dict[str, NDArray[Any]], name: str, copy: jax.Array, kept: bool) -> None:
    if kept:
        # Needs no second copy if host and device share memory, because nothing else refers to `copy`.
        copies[name] = np.asarray(copy if copy.is_fully_addressable else copy.addressable_data(0))
    else:
        copy.block_until_ready()


@cache
def _copying(sharding: Sharding, rounds: bool) -> "jax.stages.Wrapped":
    """Compiled function that copies tensors of a sharding; every process gets whole tensors if processes share them."""
    copying = _rounded if rounds else jnp.copy
    if isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable:
        return jax.jit(copying, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))  # type: ignore[no-untyped-call]
    return jax.jit(copying)


def _rounded(values: jax.Array) -> jax.Array:
    """Return float32 values in bfloat16, to the nearest, ties to even."""
    return jax.lax.bitcast_convert_type(_rounded_bits(values), jnp.bfloat16)


def _rounded_bits(values: jax.Array) -> jax.Array:
    """Return the bits of float32 values in bfloat16 (uint16), to the nearest, ties to even.

    It uses integers, because the conversions of devices may flush subnormal numbers to zero.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    nearest = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) >> 16
    not_a_number = ((bits >> 16) & jnp.uint32(0x8000)) | jnp.uint32(0x7FC0)
    is_number = (bits & jnp.uint32(0x7FFFFFFF)) <= jnp.uint32(0x7F800000)
    return jnp.where(is_number, nearest, not_a_number).astype(jnp.uint16)


_ROUNDED = jax.jit(_rounded_bits)
_ROUNDED_INTO = jax.jit(lambda values, _memory: _rounded_bits(values), donate_argnums=1, keep_unused=True)
"""Rounds values into the memory of the second argument."""


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
