"""Settings of the loss: what a recipe decides, what wins over it, and what is refused."""

import dataclasses
import math
import tomllib
from typing import Any

import pytest

from rollstream.consumers.learner.objective import (
    RECIPES,
    LossConfig,
    LossRecipe,
    denominator_of,
    needs_proximal,
    needs_reference,
    policy_metrics,
    token_weight,
    trains,
)
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.settings import Layer, fill
from rollstream.topics.errors import ConfigurationError


def given(name: str) -> LossConfig:
    return LossConfig(name=name, length_norm=4.0) if name == "dr_grpo" else LossConfig(name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_a_loss_by_name_alone_is_its_recipe_and_what_is_set_wins(name: str) -> None:
    assert given(name).recipe == RECIPES[name]._replace(length_norm=given(name).recipe.length_norm)
    changed: Any = {"reduction": "token_mean", "clip_low": 0.05, "entropy_coefficient": 0.5, "train_truncated": False}
    assert dataclasses.replace(given(name), **changed).recipe == given(name).recipe._replace(**changed)


def test_zero_and_false_are_settings_too() -> None:
    recipe = LossConfig(entropy_coefficient=0.0, train_truncated=False).recipe
    assert (recipe.entropy_coefficient, recipe.train_truncated) == (0.0, False)
    assert LossConfig(name="dapo", train_truncated=True).recipe.train_truncated


def test_every_part_of_a_recipe_can_be_set() -> None:
    assert set(LossRecipe._fields) <= {field.name for field in dataclasses.fields(LossConfig)}


@pytest.mark.parametrize(
    ("settings", "weight", "denominator"),
    [
        ({"reduction": "token_mean"}, 1.0, "tokens"),
        ({"reduction": "sequence_mean_token_mean"}, 1 / 7, "sequences"),
        ({"reduction": "sequence_mean_token_sum_norm", "length_norm": 40.0}, 1 / 40, "sequences"),
        ({"name": "rloo"}, 1.0, "sequences"),
    ],
)
def test_a_reduction_decides_weight_and_denominator(settings: Any, weight: float, denominator: str) -> None:
    config = LossConfig(**settings)
    assert (token_weight(config, 7), denominator_of(config)) == (weight, denominator)


def test_overlong_filtering_masks_truncated_rollouts_only() -> None:
    assert trains(LossConfig(), truncated=True)
    assert [trains(LossConfig(name="dapo"), truncated) for truncated in (False, True)] == [True, False]


def test_proximal_log_probabilities_are_needed_where_weights_meet_several_updates() -> None:
    assert not needs_proximal(LossConfig(), 4)
    assert not needs_proximal(LossConfig(importance_sampling="masked"), 1)
    assert needs_proximal(LossConfig(importance_sampling="masked"), 2)
    assert needs_proximal(LossConfig(name="rloo"), 2)
    assert needs_reference(LossConfig(kl_coefficient=0.01))
    assert not needs_reference(LossConfig())


def test_metrics_are_named_for_what_is_configured() -> None:
    assert "importance/weight_mean" in policy_metrics(LossConfig(name="rloo"))
    assert "importance/weight_mean" not in policy_metrics(LossConfig())
    assert "kl/mean" in policy_metrics(LossConfig(), reference=True)


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
