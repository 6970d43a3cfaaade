"""Layers that are scanned train as layers that are unrolled, and compile once."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from rollstream.consumers.learner.training.packing import pack_for
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models.parameters import shapes
from tests.support.mesh_child import CONFIG, rollouts


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.long)], ids=["kept", "recomputed"])
def test_scanned_layers_train_what_unrolled_ones_do_up_to_rounding_under_the_same_names(remat: bool) -> None:
    deep = replace(CONFIG, minibatches=1, remat=remat, model=replace(CONFIG.model, num_hidden_layers=2))
    draw = np.random.default_rng(3)
    begun = {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes(deep.model).items()}
    unrolled, scanned = (TrainStep(replace(deep, layers=layers)) for layers in ("unrolled", "scanned"))
    actual = [step.train(step.fresh_state(begun), pack_for(deep, rollouts(0))) for step in (unrolled, scanned)]
    (one, metrics), (other, others) = actual
    assert set(one.params) == set(other.params) == set(begun)
    for name, value in one.params.items():
        np.testing.assert_allclose(value, other.params[name], atol=5e-6, err_msg=name)
    assert metrics == pytest.approx(others, abs=2e-5)


@pytest.mark.long
def test_the_program_of_many_layers_is_as_long_as_that_of_few_unless_they_are_unrolled() -> None:
    def gradient(layers: int, compiled: Literal["auto", "unrolled"] = "auto") -> Any:
        config = replace(CONFIG, layers=compiled, model=replace(CONFIG.model, num_hidden_layers=layers))
        lowered = TrainStep(config).lower()
        return next(function for name, function in lowered.items() if name.startswith("gradient"))

    def products(lowered: Any) -> int:
        return lowered.as_text().count("stablehlo.dot_general")

    assert products(gradient(24)) == products(gradient(6))
    assert products(gradient(24, "unrolled")) > 3 * products(gradient(6, "unrolled"))
