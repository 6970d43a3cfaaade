"""A grouping process over a model of Kafka: what its metrics say about the records that it has yet to read."""

import threading
from collections.abc import Iterator

import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.grouping.process.grouping_process import GroupingProcess
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.codec import decode, encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.keys import encode_key
from rollstream.topics.records import Metrics
from tests.simulation.installation import World, installed
from tests.simulation.scheduler import Process

KAFKA = KafkaConfig(bootstrap_servers="model:1")
GROUPING = GroupingConfig()
GROUPER = GrouperConfig(metrics_interval_s=1.0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with installed(world):
        yield world


def test_the_marker_of_a_transaction_is_no_lag(world: World) -> None:
    cluster, stop = world.begin(), threading.Event()
    names = ("rollouts", "batches", "batch-index", "journal", "dead-letters", "policies", "control", "metrics")
    for name in names:
        cluster.create(f"run.{name}", 1)
    world.result_of(lambda: initialise(KAFKA, "run", GROUPING, GROUPER))
    [rollouts], [metrics] = cluster.topics["run.rollouts"], cluster.topics["run.metrics"]

    def write() -> None:
        value = encode(example_rollout(f"open-{rollouts.end}", 1.0, group_size=8))
        rollouts.append(cluster.now_ms, encode_key("env", "0"), value, [], (7, rollouts.end), 0, transactional=True)
        rollouts.mark(cluster.now_ms, 7, commit=True)

    def reports() -> list[tuple[float, float | None]]:
        """Each position with the lag."""
        records = [decode(entry.value) for entry in metrics.visible(0, metrics.end, True)[0]]
        whole = [r for r in records if isinstance(r, Metrics) and r.labels.get("partition") == "0"]
        return [(r.values["position"], r.values.get("lag")) for r in whole if "position" in r.values]

    def await_reports(position: int) -> None:
        world.scheduler.run(lambda: sum(at == position for at, _lag in reports()) >= 3)

    def work() -> None:
        GroupingProcess(KAFKA, "run", GROUPING, GROUPER, 0, lambda: None).run(stop)

    write()
    process = world.scheduler.spawn(Process("group-0"), "group-0", work)
    try:
        await_reports(1)
        assert reports()[-1] == (1, 0)
        write()
        await_reports(3)
        assert reports()[-1] == (3, 0)
        stop.set()
        world.scheduler.run(lambda: process.done)
        assert process.error is None
    finally:
        world.scheduler.end()
