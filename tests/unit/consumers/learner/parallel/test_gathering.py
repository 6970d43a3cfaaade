"""Gradients are scattered where parameters are shared: each device receives its share's sum in the configured dtype."""

import json
import math
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tests.support.collectives_child import LARGEST_SMALL, Job
from tests.support.paths import ROOT


def compiled(job: Job, devices: int = 8) -> list[dict[str, Any]]:
    """The reductions of the gradients of a job, compiled in a process of its own."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.support.collectives_child", msgspec.json.encode(job).decode()],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("TPU_WORKER")},
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if job.topology else "1",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            # Needed to compile without a TPU; these have no effect on a CPU.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    decoded: list[dict[str, Any]] = json.loads(answer.stdout)
    return decoded


def sizes(program: dict[str, Any], operation: str) -> list[int]:
    """Sizes of the matrices that result from one kind of operation on the gradients."""
    shapes = [shape for name, _dtype, shape in program["reductions"] if name == operation]
    return sorted(size for size in map(math.prod, shapes) if size > LARGEST_SMALL)


MATRICES = (512 * 512, 512 * 512, 256 * 512, 256 * 512, 512 * 512, 512 * 1024, 512 * 1024, 512 * 1024)
"""Sizes of the embedding and of the projections of a block."""


@pytest.mark.long
def test_each_device_receives_the_sum_of_its_share_alone() -> None:
    (shared,) = compiled(Job(meshes=[[2, 4, 1]]))
    assert sizes(shared, "reduce-scatter") == sorted(size // 4 for size in MATRICES)
    # Copies of a share are summed once, at the end; no whole matrix is summed.
    assert max(sizes(shared, "all-reduce")) == max(MATRICES) // 4
    assert shared["scattered"] == ["bf16"]


@pytest.mark.long
def test_without_copies_nothing_but_shares_is_summed_in_float32_by_option_and_where_products_are_split_too() -> None:
    shared, split = compiled(Job(meshes=[[1, 8, 1], [2, 2, 2]], reduce_dtype="float32"))
    assert sizes(shared, "reduce-scatter") == sorted(size // 8 for size in MATRICES)
    assert sizes(shared, "all-reduce") == []
    assert shared["scattered"] == split["scattered"] == ["f32"]
    assert sizes(split, "reduce-scatter") == sorted(size // 4 for size in MATRICES)


@pytest.mark.long
@pytest.mark.parametrize(("reduce_dtype", "actual"), [("compute", "bf16"), ("float32", "f32")])
def test_the_compiler_of_tpus_scatters_too(reduce_dtype: str, actual: str) -> None:
    (shared,) = compiled(Job(meshes=[[1, 8, 1]], topology="v5e:2x4", reduce_dtype=reduce_dtype))
    assert shared["scattered"] == [actual]
    reductions = shared["reductions"]
    assert {dtype for name, dtype, _shape in reductions if name == "reduce-scatter"} == {actual}
