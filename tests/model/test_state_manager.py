"""The state manager over a real broker: one trains, and others ask for versions newer than their own."""

import numpy as np
import pytest

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.state_manager import StateManager
from rollstream.topics.config import TopicsConfig
from rollstream.topics.errors import Fenced
from rollstream.topics.kafka import provisioning
from tests.support.runs import RealRun


def params(value: float) -> dict[str, object]:
    return {"dense": {"kernel": np.full((40, 30), value, np.float32)}, "bias": np.full(3, value)}


def test_followers_get_the_newest_version_each_by_its_own_and_a_second_trainer_takes_over(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, TopicsConfig(partitions=1, weights_partitions=2), real_run.name)

    def manager() -> StateManager:
        return StateManager(real_run.kafka, real_run.name, config=WeightsConfig(chunk_bytes=1000))

    with manager() as trainer, manager() as one, manager() as other, manager() as second:
        assert one.get_state(-1) is None
        assert trainer.update_state(params(0.5)) == 0
        assert one.wait_for(0, 300)[0] == 0
        assert trainer.update_state(params(1.5)) == 1
        for asker in (one, other, trainer):
            version, held = asker.wait_for(1, 300)
            assert version == 1
            assert held["dense"]["kernel"].dtype == np.float32
            assert np.array_equal(held["dense"]["kernel"], params(1.5)["dense"]["kernel"])  # type: ignore[index]
            assert held["bias"].tolist() == [1.5] * 3
            assert asker.get_state(1) is None
            assert asker.get_state(0) is not None
        assert second.update_state(params(2.5)) == 2
        assert one.wait_for(2, 300)[1]["bias"].tolist() == [2.5] * 3
        with pytest.raises(Fenced, match="was taken over"):
            trainer.update_state(params(9.0))
        assert one.get_state(2) is None
