"""The roles of a run, from its configuration."""

from pathlib import Path

from rollstream.pipeline.config import load
from rollstream.pipeline.run import plan as plans


def test_a_run_has_a_gateway_where_it_has_a_port_and_it_counts_as_a_producer() -> None:
    without, with_one = load(), load(flags=["gateway.port=8100"])
    assert plans.plan(without, Path("run.toml")).gateways == ()
    (spec,) = plans.plan(with_one, Path("run.toml")).gateways
    assert "gateway" in spec.arguments
    assert with_one.capacity.workers == without.capacity.workers + 1
