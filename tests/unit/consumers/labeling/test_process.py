"""A labeling process over a model of Kafka."""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.process import LabelingProcess
from rollstream.topics.kafka import clients
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.simulation.installation import World
from tests.simulation.scheduler import Process
from tests.support.modelled_run import KAFKA, RUN, ModelledRun
from tests.support.runs import rollout
from tests.support.virtual_time import AdvancingSelector


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


LABEL_S = 20.0


def label_in_place(_rollout: Rollout) -> float:
    time.sleep(LABEL_S)
    return 1.0


async def label_together(_rollout: Rollout) -> float:
    await asyncio.sleep(3 * LABEL_S)
    return 1.0


@pytest.mark.parametrize("labeler", [label_in_place, label_together])
def test_figures_are_written_while_the_records_of_a_poll_are_labeled(
    world: World, monkeypatch: pytest.MonkeyPatch, labeler: Callable[[Rollout], Any]
) -> None:
    """A process without figures for a minute counts as gone."""
    run = ModelledRun(world)
    monkeypatch.setattr(selectors, "DefaultSelector", partial(AdvancingSelector, world.scheduler.sleep))
    for number in range(3):
        run.write("unlabelled", encode_key("env", str(number)), encode(rollout(str(number), reward=0.0)))
    stop = threading.Event()

    def work() -> None:
        LabelingProcess(labeler, KAFKA, RUN, LabelingConfig(commit_interval_s=1e6), 0, lambda: None).run(stop)

    actor = world.scheduler.spawn(Process("label-0"), "label-0", work)
    before = run.log("rollouts").end
    world.scheduler.run(lambda: actor.done or run.log("rollouts").end > before)
    written = run.log("metrics").end
    stop.set()
    world.scheduler.run(lambda: actor.done)
    assert actor.error is None
    assert written >= 2


class Hanging:
    """A labeler whose calls never end; once three have begun, the task that waits for them is cancelled."""

    def __init__(self) -> None:
        self.calls: set[Any] = set()
        self.ended: list[str] = []

    async def __call__(self, _rollout: Rollout) -> float:
        self.calls.add(asyncio.current_task())
        if len(self.calls) == 3:
            [waiting] = asyncio.all_tasks() - self.calls
            waiting.cancel()
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.ended.append("call")
            raise

    async def close(self) -> None:
        self.ended.append("labeler")


def test_calls_that_are_cancelled_end_before_their_labeler_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, labeler = ModelledRun(world), Hanging()
    monkeypatch.setattr(selectors, "DefaultSelector", partial(AdvancingSelector, world.scheduler.sleep))
    for number in range(3):
        run.write("unlabelled", encode_key("env", str(number)), encode(rollout(str(number), reward=0.0)))

    def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            LabelingProcess(labeler, KAFKA, RUN, LabelingConfig(), 0, lambda: None).run(threading.Event())

    actor = world.scheduler.spawn(Process("label-0"), "label-0", work)
    world.scheduler.run(lambda: actor.done)
    assert actor.error is None
    assert labeler.ended == ["call", "call", "call", "labeler"]
