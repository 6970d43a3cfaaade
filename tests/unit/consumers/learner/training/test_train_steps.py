"""A step on record is computed by its own rules, so that its bits stay the same; a new step uses the newest rules."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.learner.input.packing import pack_for
from rollstream.consumers.learner.step_rules import NEWEST, StepRules
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.learner.training.train_steps import TrainSteps
from rollstream.consumers.models.parameters import shapes
from tests.support.mesh_child import CONFIG, params, rollouts

BLOCKS = replace(CONFIG, attention="blocks", minibatches=1)


def trained(train_step: TrainStep) -> dict[str, np.ndarray]:
    """Parameters after one step."""
    state, _metrics = train_step.train(train_step.fresh_state(params(BLOCKS.model)), pack_for(BLOCKS, rollouts(0)))
    return {name: np.asarray(value) for name, value in state.params.items()}


def test_a_step_of_an_earlier_release_gets_the_bits_of_its_attention_and_a_new_one_agrees_up_to_rounding() -> None:
    steps = TrainSteps(BLOCKS)
    assert steps.of(NEWEST) is steps.newest
    earlier = steps.of(StepRules.recorded({}))
    assert steps.of(StepRules.recorded({"sharing": "batches"})) is earlier
    now, before = trained(steps.newest), trained(earlier)
    as_it_was = trained(TrainStep(replace(BLOCKS, attention="whole_rows")))
    for name, value in before.items():
        np.testing.assert_array_equal(value, as_it_was[name], err_msg=name)
        np.testing.assert_allclose(value, now[name], atol=5e-6, err_msg=name)


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "recomputed"])
def test_scanned_layers_train_what_unrolled_ones_do_up_to_rounding_under_the_same_names(remat: bool) -> None:
    deep = replace(BLOCKS, attention="auto", remat=remat, model=replace(BLOCKS.model, num_hidden_layers=3))
    draw = np.random.default_rng(3)
    begun = {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes(deep.model).items()}
    unrolled, scanned = (TrainStep(replace(deep, layers=layers)) for layers in ("unrolled", "scanned"))
    actual = [step.train(step.fresh_state(begun), pack_for(deep, rollouts(0))) for step in (unrolled, scanned)]
    (one, metrics), (other, others) = actual
    assert set(one.params) == set(other.params) == set(begun)
    for name, value in one.params.items():
        np.testing.assert_allclose(value, other.params[name], atol=5e-6, err_msg=name)
    assert metrics == pytest.approx(others, abs=2e-5)


def test_the_program_of_many_layers_is_as_long_as_that_of_few_unless_they_are_unrolled() -> None:
    def gradient(layers: int, rules: StepRules = NEWEST) -> Any:
        config = replace(CONFIG, model=replace(CONFIG.model, num_hidden_layers=layers))
        lowered = TrainStep(config, rules=rules).lower()
        return next(function for name, function in lowered.items() if name.startswith("gradient"))

    def products(lowered: Any) -> int:
        return lowered.as_text().count("stablehlo.dot_general")

    assert products(gradient(24)) == products(gradient(6))
    assert products(gradient(24, StepRules())) > 3 * products(gradient(6, StepRules()))
