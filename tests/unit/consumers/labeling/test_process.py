"""A labeling process over a model of Kafka."""

from collections.abc import Iterator
from typing import Any

import pytest

from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.process import LabelingProcess
from rollstream.topics.kafka import clients
from rollstream.topics.records import Rollout
from tests.simulation.installation import World, installed
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with installed(world):
        yield world


class Slow:
    """A labeler that says how long it takes."""

    def __call__(self, rollout: Rollout) -> float:
        return 1.0

    def longest_s(self, records: int) -> float:
        return 100.0 * records


def test_the_group_waits_for_a_labeler_as_long_as_it_may_take_for_the_records_of_a_poll(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ModelledRun(world)
    built: list[dict[str, Any]] = []
    build = clients.group_member

    def member(*arguments: Any, **settings: Any) -> Any:
        built.append(settings)
        return build(*arguments, **settings)

    monkeypatch.setattr(clients, "group_member", member)
    config = LabelingConfig(max_poll_records=8)
    world.result_of(lambda: LabelingProcess(Slow(), KAFKA, RUN, config, 0, lambda: None))
    assert 800 < built[0]["longest_poll_s"] < 900
