"""Settings of the loss: what a recipe decides, what wins over it, and what is refused."""

import dataclasses
import math
import tomllib
from typing import Any

import pytest

from rollstream.consumers.learner.objective import (
    RECIPES,
    LossConfig,
    needs_proximal,
    needs_reference,
)
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.settings import Layer, fill
from rollstream.topics.errors import ConfigurationError


def given(name: str) -> LossConfig:
    return LossConfig(name=name, length_norm=4.0) if name == "dr_grpo" else LossConfig(name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_a_loss_by_name_alone_is_its_recipe_and_what_is_set_wins(name: str) -> None:
    assert given(name).recipe == RECIPES[name]._replace(length_norm=given(name).recipe.length_norm)
    reduction = RECIPES[name].reduction if name == "dpo" else "token_mean"
    changed: Any = {"reduction": reduction, "clip_low": 0.05, "entropy_coefficient": 0.5, "train_truncated": False}
    assert dataclasses.replace(given(name), **changed).recipe == given(name).recipe._replace(**changed)


def test_proximal_log_probabilities_are_needed_where_weights_meet_several_updates() -> None:
    assert not needs_proximal(LossConfig(), 4)
    assert not needs_proximal(LossConfig(importance_sampling="masked"), 1)
    assert needs_proximal(LossConfig(importance_sampling="masked"), 2)
    assert needs_proximal(LossConfig(name="rloo"), 2)
    assert needs_reference(LossConfig(kl_coefficient=0.01))
    assert needs_reference(LossConfig(name="dpo"))
    assert not needs_reference(LossConfig())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "dr_grpo"}, r"set learner\.loss\.length_norm"),
        ({"clip_low": 1.5}, r"learner\.loss\.clip_low is 1\.5; it must be between 0\.0 and 1\.0"),
        ({"ratio_cap": 0.5}, r"learner\.loss\.ratio_cap"),
        ({"importance_high": 0.9}, r"learner\.loss\.importance_high"),
        ({"kl_coefficient": math.nan}, r"learner\.loss\.kl_coefficient"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, 'set it to "k3"'),
        ({"name": "ppo"}, "there is no loss 'ppo'; use ppo_clip"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_remedy(settings: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        LossConfig(**settings)


def test_a_loss_is_chosen_in_a_file() -> None:
    text = '[learner.loss]\nname = "dr_grpo"\nlength_norm = 512\nclip_high = 0.28\nratio_cap = inf\n'
    config, _ = fill(RunConfig, [Layer("run.toml", (), tomllib.loads(text), False)])
    recipe = config.learner.loss.recipe
    assert (recipe.length_norm, recipe.clip_low, recipe.clip_high, recipe.ratio_cap) == (512, 0.2, 0.28, math.inf)
