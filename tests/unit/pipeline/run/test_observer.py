"""How many records wait for labels, over a model of Kafka: transaction markers take offsets, and wait for nothing."""

import pytest

from rollstream.pipeline.run.observer import LabelingState, LabelingWatch
from rollstream.topics.config import KafkaConfig
from tests.simulation.group_coordinator import Committed
from tests.simulation.installation import World

KAFKA = KafkaConfig(bootstrap_servers="model:1")


@pytest.mark.parametrize(
    ("position", "state"),
    [(2, LabelingState(0, 2)), (1, LabelingState(1, 1)), (0, LabelingState(2, 0)), (-1001, LabelingState(2, 0))],
)
def test_the_marker_of_a_transaction_does_not_wait_for_a_label(
    world: World, position: int, state: LabelingState
) -> None:
    cluster = world.begin()
    cluster.create("run.unlabelled", 1)
    [log] = cluster.topics["run.unlabelled"]
    for number in range(2):
        log.append(0, b"key", b"value", [], (7, number), 0, transactional=True)
    log.mark(0, 7, commit=True)
    if position >= 0:
        cluster.groups["labelers"].offsets["run.unlabelled", 0] = Committed(position, "")

    def watched() -> LabelingState:
        with LabelingWatch(KAFKA, "run", "labelers") as watch:
            return watch.state

    assert world.result_of(watched) == state
