"""How long a drain waits for producers, according to what the metrics of the run tell about them."""

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.run.component_metrics import ComponentMetrics
from rollstream.pipeline.run.draining import required_quiet_s


def component(role: str, age_s: float = 1.0, running: float = 1.0) -> ComponentMetrics:
    values = {"running": running}
    return ComponentMetrics(component=f"{role}-0", role=role, timestamp=0.0, age_s=age_s, values=values)


ENDED, OLD, GATEWAY = component("env", 3600.0, 0.0), component("env", 90.0), component("gateway")


@pytest.mark.parametrize(
    ("components", "flags", "quiet_s"),
    [
        ((ENDED,), (), 2.0),
        ((component("env"),), (), 2.0),
        ((), (), 60.0),
        ((component("infer"),), (), 60.0),
        # A worker that wrote no record for longer than a minute may still play.
        ((OLD,), (), 60.0),
        ((ENDED,), ("worker.metrics_interval_s=120",), 60.0),
        ((ENDED,), ("worker.metrics_interval_s=0",), 60.0),
        # A worker tells nothing about sessions, nor a gateway about episodes.
        ((ENDED,), ("gateway.port=8100",), 60.0),
        ((GATEWAY,), ("gateway.port=8100",), 60.0),
        ((ENDED, GATEWAY), ("gateway.port=8100",), 2.0),
        ((ENDED, GATEWAY), ("gateway.port=8100", "gateway.metrics_interval_s=60"), 60.0),
        # The run may have gateways that these settings do not have.
        ((ENDED, component("gateway", 90.0)), (), 60.0),
    ],
)
def test_producers_are_quiet_at_once_only_if_all_of_them_are_known(
    components: tuple[ComponentMetrics, ...], flags: tuple[str, ...], quiet_s: float
) -> None:
    assert required_quiet_s(load(flags=flags), components) == quiet_s
