"""The checks of a user's loss pass for every loss that ships, and find each kind of mistake."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rollstream.consumers.learner.objective import RECIPES, LossRecipe, TokenArrays
from rollstream.consumers.learner.testing import check_loss
from rollstream.topics.errors import ConfigurationError

SHORT = "ppo_clip"
"""The loss that is always checked; the others are long."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == SHORT else pytest.mark.long) for name in RECIPES if name != "dpo"]
)
def test_every_loss_that_ships_passes(name: str) -> None:
    check_loss(name, on_policy=name != "ce", **({"length_norm": 4.0} if name == "dr_grpo" else {}))


@pytest.mark.long
def test_a_loss_passes_beside_divergence_entropy_and_weights() -> None:
    check_loss(
        "grpo", kl_coefficient=0.2, entropy_coefficient=0.1, importance_sampling="masked", importance_level="geometric"
    )


def _reinforce(tokens: TokenArrays, recipe: LossRecipe) -> jax.Array:
    return -tokens.advantages * tokens.log_probs


def _doubled(tokens: TokenArrays, recipe: LossRecipe) -> jax.Array:
    return 2 * _reinforce(tokens, recipe)


@jax.custom_jvp
def _wrong_square(x: jax.Array) -> jax.Array:
    return x * x


@_wrong_square.defjvp
def _wrong_square_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0] ** 2, primals[0] * tangents[0]


def _wrong_gradient(tokens: TokenArrays, recipe: LossRecipe) -> jax.Array:
    return _wrong_square(tokens.log_ratio)


def _means_of_rows(tokens: TokenArrays, recipe: LossRecipe) -> jax.Array:
    return _reinforce(tokens, recipe) * jnp.exp(tokens.log_ratio).mean(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_doubled, "the policy gradient .* give on_policy=False"),
        (_wrong_gradient, "the gradient of the loss is .* where its value changes by"),
        (_means_of_rows, "depending on how an update is packed"),
    ],
)
def test_a_mistake_is_found_and_named(loss: Callable[..., Any], words: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){words}"):
        check_loss(loss)


def test_a_loss_that_claims_no_policy_gradient_is_not_held_to_it() -> None:
    check_loss(_doubled, on_policy=False)


def test_constants_are_held_in_jitted_parts_too() -> None:
    @jax.jit
    def constant(x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(jnp.exp(x))

    check_loss(lambda tokens, _recipe: -constant(tokens.log_ratio) * tokens.advantages * tokens.log_probs)


def test_a_loss_of_another_shape_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="return one number for each token"):
        check_loss(lambda tokens, recipe: _reinforce(tokens, recipe).mean())


def test_a_loss_that_is_not_finite_where_nothing_is_trained_is_found() -> None:
    def infinite(tokens: TokenArrays, recipe: LossRecipe) -> jax.Array:
        return -tokens.advantages * jnp.where(tokens.mask > 0, tokens.log_probs, math.inf * tokens.log_ratio)

    with pytest.raises(AssertionError):
        check_loss(infinite)
