"""Steps of an external trainer over a model of Kafka."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.batch_reader import BatchReader, ReadBatch
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import LearnerStep
from tests.simulation.installation import World
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


def test_a_step_executed_again_may_give_other_reasons_for_the_batches_it_skips(world: World) -> None:
    run = ModelledRun(world)
    for _batch in range(2):
        run.send()
    run.group()

    def reads() -> list[ReadBatch]:
        with BatchReader(KAFKA, RUN) as reader:
            return [read for read in (reader.poll(60), reader.poll(60)) if read is not None]

    def record(loss: float, digest: str, *, skips: int = 1) -> LearnerStep:
        with StepWriter(KAFKA, RUN, learner="test", take_over=True, after_step=0) as steps:
            batches = reads()
            reasons = {read.entry.batch_id: f"loss {loss} too high" for read in batches[:skips]}
            return steps.record(batches, digest=digest, skipped=reasons)

    first = world.result_of(lambda: record(9.25, "checkpoint-1"))
    assert [use.use for use in first.uses] == ["skipped", "trained"]
    assert world.result_of(lambda: record(9.26, "checkpoint-1")) == first
    other = world.result_of(lambda: record(9.27, "checkpoint-1b"))
    assert (other.uses[0].reason, other.policy_version) == ("loss 9.27 too high", first.policy_version + 1)
    with pytest.raises(StateRefused, match=r"has batches .* skipped, .* skipped, but .* trained are on record"):
        world.result_of(lambda: record(9.25, "checkpoint-1", skips=2))


class Parameter:
    """An array that notes whether it is asked for a copy."""

    def __init__(self) -> None:
        self.values = np.arange(4.0)
        self.copies: list[bool | None] = []

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.float64]:
        self.copies.append(copy)
        return self.values.copy() if copy else self.values


@pytest.mark.parametrize(("anchor_every", "copies"), [(1, False), (10, True)])
def test_parameters_are_copied_only_if_the_next_version_may_be_a_delta_of_them(
    world: World, anchor_every: int, copies: bool
) -> None:
    ModelledRun(world)
    parameter = Parameter()

    def publish() -> int:
        config = WeightsConfig(anchor_every=anchor_every)
        with StepWriter(KAFKA, RUN, learner="test", config=config) as steps:
            return steps.publish_version({"layer": {"weight": parameter}})

    world.result_of(publish)
    assert (True in parameter.copies) is copies
