"""Snapshots of parameters in the memory of the host, in the dtype they are published in.

Rounding happens where the parameters lie, so half the bytes leave the devices, and the host never holds them in
float32. A snapshot shares no memory with the parameters, whose buffers the next step reuses, and none with another
snapshot that anything still refers to.
"""

import weakref
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


class Snapshots:
    """Snapshots of one learner, which take turns with the same memory where the device is the host.

    New memory takes longer than the copies that fill it, and what is freed may stay with the process.
    """

    def __init__(self, dtype: str = "") -> None:
        """Parameters of float32 are rounded if `dtype` is bfloat16.

        Rounding is that of `weights.conversion.converted`, in every bit; other dtypes are left for that function.
        """
        self._rounds = dtype == "bfloat16"
        self._memory: dict[str, list[_Copy]] = {}

    def take(self, params: Mapping[str, jax.Array], *, keep: Container[str] | None = None) -> dict[str, NDArray[Any]]:
        """Copy whole parameters to the host.

        All processes that share them call it together, whatever the sharding. Each gets those that it is to `keep`, by
        default all; the others never leave its devices, which hold a few of them at a time beside the parameters.
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
        """Round a tensor into the memory of an earlier copy of it that nothing refers to any more, or into new one."""
        earlier = self._memory.setdefault(name, [])
        free = next((copy for copy in earlier if copy.free), None)
        if free is None:
            bits = _ROUNDED(value)
        else:
            earlier.remove(free)
            # If anything did refer to it, JAX would take new memory.
            bits = _ROUNDED_INTO(value, free.bits)
        copy = _Copy(bits.block_until_ready())
        earlier.append(copy)
        return copy.shown()


class _Copy:
    """A rounded tensor in memory of JAX, of which it is told whether numpy still shows it."""

    def __init__(self, bits: jax.Array) -> None:
        self.bits = bits
        self._shown: weakref.ref[NDArray[Any]] | None = None

    @property
    def free(self) -> bool:
        """Whether the array that showed it is gone, and with it all views of that."""
        return self._shown is not None and self._shown() is None

    def shown(self) -> NDArray[Any]:
        """Return the tensor as numpy has it, without another copy."""
        bits: Any = self.bits
        array: NDArray[Any] = np.from_dlpack(bits)
        self._shown = weakref.ref(array)
        return array.view(jnp.bfloat16)


def snapshot(
    params: Mapping[str, jax.Array], dtype: str = "", *, keep: Container[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Take one snapshot, in memory of its own."""
    return Snapshots(dtype).take(params, keep=keep)


def _on_host(value: jax.Array) -> bool:
    """Whether the tensor lies in the memory of the host, in one piece."""
    devices: Any = value.sharding.device_set
    return len(devices) == 1 and value.is_fully_addressable and all(device.platform == "cpu" for device in devices)


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
    """Return float32 values in bfloat16, to the nearest, ties to even."""
    return jax.lax.bitcast_convert_type(_rounded_bits(values), jnp.bfloat16)


def _rounded_bits(values: jax.Array) -> jax.Array:
    """Return the bits of float32 values in bfloat16 (uint16), to the nearest, ties to even.

    With integers, because conversions of devices may flush subnormal numbers to zero.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    nearest = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) >> 16
    not_a_number = ((bits >> 16) & jnp.uint32(0x8000)) | jnp.uint32(0x7FC0)
    is_number = (bits & jnp.uint32(0x7FFFFFFF)) <= jnp.uint32(0x7F800000)
    return jnp.where(is_number, nearest, not_a_number).astype(jnp.uint16)


_ROUNDED = jax.jit(_rounded_bits)
_ROUNDED_INTO = jax.jit(lambda values, _memory: _rounded_bits(values), donate_argnums=1, keep_unused=True)
"""Rounds values into memory that is given for it."""
