"""Snapshots hold the values of their moment, in the bits that conversion on the host gives."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.learner.training.snapshot import Snapshots, device_checksum, snapshot
from rollstream.consumers.weights.content import converted
from rollstream.topics.wire.params_digest import params_checksum, params_digest
from tests.support.paths import ROOT


def every_kind_of_float() -> np.ndarray:
    """Ties, subnormal numbers, the largest ones, infinities, NaNs of several payloads, and random bits."""
    ties = np.arange(1 << 12, dtype="<u4") << 15
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000], "<u4")
    random = np.random.default_rng(1).integers(2**32, size=1 << 16, dtype="<u4")
    bits = np.concatenate([ties, edges, random])
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view("<f4")


def test_it_rounds_as_the_host_does_in_every_bit() -> None:
    values = every_kind_of_float()
    with np.errstate(invalid="ignore"):  # signalling NaNs would warn
        expected = converted({"w": values}, "bfloat16")["w"]
    copied = snapshot({"w": jnp.asarray(values)}, "bfloat16")["w"]
    assert copied.dtype == expected.dtype
    assert np.array_equal(copied.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", ["", "bfloat16", "float32"])
def test_it_keeps_its_values_when_the_next_step_reuses_the_buffers(dtype: str) -> None:
    values = np.random.default_rng(3).standard_normal((64, 65)).astype("<f4")
    update = jax.jit(lambda array: array * 2 + 1, donate_argnums=0)
    params = {f"layer.{number}": jnp.asarray(values + number) for number in range(5)} | {"count": jnp.arange(7)}
    expected = converted({name: np.array(value) for name, value in params.items()}, dtype or "float32")
    held = snapshot(params, dtype)
    for _ in range(3):
        params = {name: update(value) for name, value in params.items()}
    jax.block_until_ready(params)
    assert list(held) == list(params)
    assert params_digest(held) == params_digest(expected)


def test_snapshots_take_turns_with_the_memory_of_those_that_nothing_refers_to() -> None:
    shape, snapshots = (64, 65), Snapshots("bfloat16")
    values = [np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in range(5)]

    def taken(number: int) -> np.ndarray:
        return snapshots.take({"w": jnp.asarray(values[number])})["w"]

    def expected(number: int) -> np.ndarray:
        return converted({"w": values[number]}, "bfloat16")["w"]

    first, second = taken(0), taken(1)
    of_first, of_second = first.ctypes.data, second.ctypes.data
    assert of_first != of_second
    rows = memoryview(first.view(np.uint8).reshape(-1))
    del first
    third = taken(2)
    assert third.ctypes.data not in (of_first, of_second), "a view still shows the first one"
    assert bytes(rows) == expected(0).tobytes()
    del rows
    fourth = taken(3)
    assert fourth.ctypes.data == of_first
    for number, array in ((1, second), (2, third), (3, fourth)):
        assert np.array_equal(array.view(np.uint16), expected(number).view(np.uint16)), number
    with pytest.raises(ValueError, match="read-only"):
        fourth[:] = 0


def test_jax_writes_into_no_buffer_that_numpy_still_shows() -> None:
    """Snapshots rely on this if something else refers to their memory."""
    into = jax.jit(lambda values, _memory: values + 1, donate_argnums=1, keep_unused=True)
    memory = jnp.full(999, 7, jnp.uint16)
    shown = np.from_dlpack(memory)
    again = into(jnp.zeros(999, jnp.uint16), memory)
    assert (np.asarray(again) == 1).all()
    assert (shown == 7).all()


def test_a_process_that_keeps_nothing_gets_nothing() -> None:
    assert snapshot({f"w{number}": jnp.arange(3.0) for number in range(4)}, keep=()) == {}


SHARDED = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rollstream.consumers.learner.training.snapshot import device_checksum
from rollstream.consumers.learner.training.snapshot import snapshot
from rollstream.topics.wire.params_digest import params_digest

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
array = np.random.default_rng(5).standard_normal((16, 24)).astype("<f4")
specs = [P(), P("fsdp"), P(None, "fsdp"), P("data", "fsdp"), P(("data", "fsdp"))]
params = {str(number): jax.device_put(array, NamedSharding(mesh, spec)) for number, spec in enumerate(specs)}
checksums = [device_checksum({"w": held}) for held in params.values()]
digests = [params_digest({"w": taken}) for taken in snapshot(params, "bfloat16").values()]
print(json.dumps([checksums, digests]))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (2, 3, 4)])
def test_it_is_the_definition(dtype: str, shape: tuple[int, ...]) -> None:
    values = jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.float32).astype(dtype)
    params = {"layer.kernel": values, "bias": values}
    assert device_checksum(params) == params_checksum({name: np.asarray(value) for name, value in params.items()})


def test_it_does_not_depend_on_the_sharding() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", SHARDED]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    array = np.random.default_rng(5).standard_normal((16, 24)).astype("<f4")
    checksums, digests = json.loads(child.stdout)
    assert set(checksums) == {params_checksum({"w": array})}
    assert set(digests) == {params_digest(converted({"w": array}, "bfloat16"))}


def test_values_of_eight_bytes_are_refused() -> None:
    import jax

    with jax.enable_x64(), pytest.raises(ValueError, match="float64"):
        device_checksum({"w": jnp.zeros(3, "float64")})
