"""A step executed again has the bits on record, or differs by no more than the tolerance, or is refused."""

import math

import pytest

from rollstream.consumers.learner.records.step_recorder import difference_from, replay_difference
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import BatchUse, LearnerStep

MEASURES = {"loss": 0.5, "entropy/mean": 2.0, "optim/grad_norm": 0.1, "time/step": 3.0}
USES = (BatchUse(batch_id="0-1", index_offset=4, rows=16, use="trained"),)
RECORD = LearnerStep(
    learner="default",
    step=7,
    input_run="r",
    uses=USES,
    position=5,
    policy_version=7,
    params_digest="then",
    trained_total=16,
    skipped_total=0,
    metrics=MEASURES,
)
NEAR = {**MEASURES, "optim/grad_norm": 0.1 * (1 - 5e-4)}


def test_the_same_bits_differ_by_nothing_and_other_bits_by_more() -> None:
    assert difference_from(RECORD, "then", USES, {}, True, 0.0) == 0.0
    assert difference_from(RECORD, "now", USES, NEAR, True, 1e-3) == pytest.approx(5e-4)
    assert difference_from(RECORD, "now", USES, MEASURES, True, 1e-3) > 0.0
    # On other devices any difference is accepted; without measures the difference counts as 0.
    assert difference_from(RECORD, "now", USES, {**MEASURES, "loss": 1.0}, False, 0.0) == 0.5
    assert difference_from(RECORD, "now", USES, {}, False, 0.0) == 0.0


def test_more_than_the_tolerance_is_refused_and_so_are_other_batches() -> None:
    with pytest.raises(StateRefused, match=r"step 7 of learner 'default'.* differ by 0.0005 at a tolerance of 0\."):
        difference_from(RECORD, "now", USES, NEAR, True, 0.0)
    # The first step with other bits has the same measures; only the parameters after it differ.
    with pytest.raises(StateRefused, match=r" differ by 0 at a tolerance of 0\."):
        difference_from(RECORD, "now", USES, MEASURES, True, 0.0)
    with pytest.raises(StateRefused, match=r"tolerance of 0.0001"):
        difference_from(RECORD, "now", USES, NEAR, True, 1e-4)
    with pytest.raises(StateRefused, match=r"from batches 0-1 trained; on record are then from 0-1 trained"):
        difference_from(RECORD, "now", USES, {}, True, 1.0)
    for same_bits in (True, False):
        with pytest.raises(StateRefused):
            difference_from(RECORD, "now", (), MEASURES, same_bits, 1.0)
        with pytest.raises(StateRefused):
            difference_from(RECORD, "then", (), MEASURES, same_bits, 1.0)


def test_the_difference_is_the_largest_relative_one_of_what_a_step_measures() -> None:
    assert replay_difference(MEASURES, {**MEASURES, "time/step": 9.0}) == 0.0
    assert replay_difference(MEASURES, {**MEASURES, "optim/grad_norm": 0.1001}) == pytest.approx(1e-3, rel=1e-3)
    # Losses are about 0, so a rounding difference must not count as a difference of the whole loss.
    assert replay_difference({**MEASURES, "loss": 1e-9}, {**MEASURES, "loss": -1e-9}) == pytest.approx(2e-6)
    assert math.isinf(replay_difference(MEASURES, {}))
    assert math.isinf(replay_difference(MEASURES, {**MEASURES, "loss": math.nan}))
