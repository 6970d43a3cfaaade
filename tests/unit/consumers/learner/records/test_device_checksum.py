"""The digest of parameters that devices compute equals the digest by definition; neither it nor a snapshot depends on
the sharding."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.learner.records.device_checksum import device_checksum
from rollstream.consumers.weights.conversion import converted
from rollstream.topics.wire.params_digest import params_checksum, params_digest
from tests.support.paths import ROOT

SHARDED = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rollstream.consumers.learner.records.device_checksum import device_checksum
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
