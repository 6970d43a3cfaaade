"""Unit tests compile many small JAX functions and run each a few times: XLA's optimiser costs more than it gives.

XLA's new emitters of fused loops compile gradients of a small decoder in 1.0 CPU s, the old ones in 0.25 s; without a
split into parts that are compiled beside each other, it is 0.15 s.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.simulation.installation import World

FLAGS = (
    *("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"),
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Processes that tests start have them already; the cache of compiled programs tells "twice" from "once".
if FLAGS[0] not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()


@pytest.fixture
def world() -> Iterator["World"]:
    """The model of Kafka, which all clients of this process meet."""
    from tests.simulation.installation import World, installed

    world = World()
    with installed(world):
        yield world
