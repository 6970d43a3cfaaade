"""The losses, schedules and optimizers of docs/losses.md, from a folder outside the packages."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig, OptimizerConfig, TokenArrays
from rollstream.consumers.learner.reproducibility import differences, fingerprint
from rollstream.consumers.learner.testing import check_loss
from rollstream.consumers.learner.training.optimizer import make_optimizer, make_schedule
from rollstream.consumers.learner.training.surrogates import surrogate_of
from rollstream.consumers.learner.user_objectives import code_of
from rollstream.topics.errors import ConfigurationError
from tests.support.objectives import write_objectives

LOSS, SCHEDULE, OPTIMIZER = (f"my_objectives:{name}" for name in ("tempered", "sawtooth", "signed"))
SETTINGS = OptimizerConfig(name=OPTIMIZER, schedule=SCHEDULE, max_grad_norm=0.0, weight_decay=0.1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of the page, importable, and not yet imported."""
    write_objectives(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)
    return tmp_path


@pytest.mark.long
def test_the_test_of_the_page_passes() -> None:
    import my_objectives  # type: ignore[import-not-found]

    my_objectives.test_my_loss_is_sound()


def test_a_loss_is_reached_by_its_name_and_by_its_file(folder: Path) -> None:
    draw = np.random.default_rng(0)
    log_probs, log_ratio, advantages = draw.normal(size=(3, 2, 5))
    tokens = TokenArrays(*map(jnp.asarray, (log_probs, log_ratio, advantages)), jnp.ones((2, 5)), jnp.ones((2, 5), int))
    ratio = np.exp(log_ratio)
    expected = -advantages * ratio / (1 + 0.2 * np.abs(ratio - 1)) * log_probs
    for name in (LOSS, f"{folder / 'my_objectives.py'}:tempered"):
        result = surrogate_of(name)(tokens, LossConfig(name=name).recipe)
        np.testing.assert_allclose(result.loss, expected, rtol=1e-5)
        assert not result.low.any()


def test_a_schedule_is_reached_by_its_name() -> None:
    schedule = make_schedule(SETTINGS, 40)
    high, low = SETTINGS.learning_rate, SETTINGS.final_learning_rate
    for update in range(40):
        expected = low + (high - low) * (1 + math.cos(math.pi * (update % 10) / 10)) / 2
        assert float(schedule(update)) == pytest.approx(expected, rel=1e-5)


def test_an_optimizer_is_reached_by_its_name_between_clipping_and_decay() -> None:
    params = {"a.weight": jnp.array([[1.0, -2.0]]), "a.norm.weight": jnp.array([3.0])}
    optimizer = make_optimizer(SETTINGS, 40)
    state = optimizer.init(params)
    momentum = {name: np.zeros(value.shape) for name, value in params.items()}
    for update in range(3):
        gradients = {name: jnp.asarray(value * (update - 1.3)) for name, value in params.items()}
        changes, state = optimizer.update(gradients, state, params)
        rate = float(make_schedule(SETTINGS, 40)(update))
        for name, value in params.items():
            momentum[name] = np.asarray(gradients[name]) + SETTINGS.beta1 * momentum[name]
            decay = 0.0 if "norm" in name else SETTINGS.weight_decay * np.asarray(value)
            np.testing.assert_allclose(changes[name], -rate * (np.sign(momentum[name]) + decay), rtol=1e-5)


def test_the_code_of_a_step_is_named_with_a_digest_that_follows_its_source(folder: Path) -> None:
    config = LearnerConfig(loss=LossConfig(name=LOSS), optimizer=SETTINGS)
    code = code_of(config)
    assert {setting: name.split()[0] for setting, name in code.items()} == {
        "learner.loss.name": LOSS,
        "learner.optimizer.name": OPTIMIZER,
        "learner.optimizer.schedule": SCHEDULE,
    }
    assert code_of(config) == code
    with (folder / "my_objectives.py").open("a") as module:
        module.write("\nCHANGED = True\n")
    assert set(differences(code, code_of(config))) == set(code)
    assert code_of(LearnerConfig()) == {}


def test_a_checkpoint_tells_other_code(folder: Path) -> None:
    config = LearnerConfig(loss=LossConfig(name=LOSS))
    before = fingerprint(config)
    with (folder / "my_objectives.py").open("a") as module:
        module.write("\nCHANGED = True\n")
    after = fingerprint(config)
    assert {name for name in before if before[name] != after[name]} == {"code"}
    assert "code" not in fingerprint(LearnerConfig())


@pytest.mark.long
def test_an_installed_package_names_a_loss_by_an_entry_point(folder: Path) -> None:
    information = folder / "my_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rollstream.losses]\ntempered = my_objectives:tempered\n")
    assert LossConfig(name="tempered", clip_high=0.3).recipe.clip_high == 0.3
    check_loss("tempered")
    with pytest.raises(ConfigurationError, match="there is no optimizer 'tempered'; use adamw, adam"):
        OptimizerConfig(name="tempered")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": LossConfig(name="my_objectives:absent")}, "has no attribute 'absent'"),
        ({"loss": LossConfig(name="no_such_module:loss")}, "No module named 'no_such_module'"),
        ({"optimizer": replace(SETTINGS, schedule="my_objectives:__name__")}, "schedule is .* which is not a function"),
    ],
)
def test_an_object_that_is_no_objective_is_refused_by_name(settings: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        code_of(LearnerConfig(**settings))


def test_what_no_package_names_is_refused_with_what_there_is() -> None:
    for settings, words in (({"name": "adamx"}, "there is no optimizer 'adamx'"), ({"schedule": "wsd"}, "no schedule")):
        with pytest.raises(ConfigurationError, match=words):
            OptimizerConfig(**settings)
