"""Optimizer state in bfloat16 learns in half the bytes and is restored to the bit; a state that grows is refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rollstream.consumers.learner.config import CheckpointConfig
from rollstream.consumers.learner.objective import OptimizerConfig
from rollstream.consumers.learner.records.checkpoints import Checkpoints
from rollstream.consumers.learner.records.learner_position import LearnerPosition
from rollstream.consumers.learner.training.optimizer import make_optimizer
from rollstream.consumers.learner.training.optimizer_state import (
    in_bfloat16,
    keeping_shapes,
    stochastically_rounded,
)
from rollstream.consumers.learner.training.train_step import TrainState
from rollstream.topics.errors import ConfigurationError

SHAPES = {"model.layers.0.mlp.up_proj.weight": (64, 32), "model.norm.weight": (32,)}


def drawn(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def size_of(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def distances(
    state_dtype: Any, name: Any = "adamw", updates: int = 60, beta2: float = 0.999
) -> tuple[list[float], Any]:
    """Distances from a target on the way to it, and the state at the end."""
    config = OptimizerConfig(name=name, learning_rate=0.05, schedule="constant", beta2=beta2, state_dtype=state_dtype)
    optimizer = make_optimizer(config, updates)
    params, target = drawn(0), drawn(1)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradient = jax.tree.map(lambda p, t: 2 * (p - t), params, target)
        changes, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
        return params, state, sum(jnp.square(params[n] - target[n]).sum() for n in SHAPES)

    state, collected = optimizer.init(params), []
    for _ in range(updates):
        params, state, distance = step(params, state)
        collected.append(float(distance))
    return collected, state


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
@pytest.mark.long
def test_a_state_in_bfloat16_learns_as_one_in_float32_does_with_half_the_bytes(name: Any) -> None:
    whole, state = distances("float32", name)
    half, rounded = distances("bfloat16", name)
    assert half[-1] == pytest.approx(whole[-1], rel=0.1, abs=0.01 * whole[0])
    kept = [leaf.dtype for leaf in jax.tree.leaves(rounded) if leaf.ndim]
    assert set(kept) == {jnp.dtype(jnp.bfloat16)}
    assert size_of(rounded) < 0.51 * size_of(state)


def test_rounding_goes_to_a_neighbour_and_keeps_the_mean() -> None:
    values = jnp.full(100_000, 1.0 + 1 / 1024, jnp.float32)
    rounded = np.asarray(stochastically_rounded(values, jax.random.key(3)).astype(jnp.float32))
    assert set(np.unique(rounded)) == {1.0, 1.0 + 1 / 128}
    assert rounded.mean() == pytest.approx(1.0 + 1 / 1024, abs=1e-4)
    exact = jnp.asarray([0.0, -2.5, 1e-30], jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(stochastically_rounded(exact, jax.random.key(4)), exact.astype(jnp.bfloat16))


def test_a_second_moment_follows_changes_below_half_a_unit_of_bfloat16() -> None:
    """At least its mean does; rounded to nearest, it would not change."""
    average = optax.ema(0.999, debias=False)
    rounded = in_bfloat16(average)
    params = {"w": jnp.zeros(20_000)}
    state: Any = rounded.init(params)
    state = state._replace(inner=jax.tree.map(lambda leaf: jnp.ones_like(leaf), state.inner))
    for _ in range(20):
        _, state = jax.jit(rounded.update)(params, state)
    moment = np.asarray(state.inner.ema["w"].astype(jnp.float32))
    assert moment.mean() == pytest.approx(0.999**20, abs=5e-4)


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    optimizer = make_optimizer(OptimizerConfig(state_dtype="bfloat16"), 10)
    step = jax.jit(optimizer.update)

    def after(state: TrainState, first: int, last: int) -> TrainState:
        for seed in range(first, last):
            changes, inner = step(drawn(seed), state.optimizer, state.params)
            params = optax.apply_updates(state.params, changes)
            state = state._replace(params=params, optimizer=inner, step=state.step + 1)
        return state

    params = jax.tree.map(jnp.asarray, drawn(0))
    fresh = TrainState(params, optimizer.init(params), jnp.zeros(2, jnp.uint32), jnp.zeros((), jnp.int32))
    halfway = after(fresh, 1, 4)
    with Checkpoints(CheckpointConfig(directory=str(tmp_path)), "run", "learner") as checkpoints:
        checkpoints.save(halfway, LearnerPosition(position=0), {})
        checkpoints.wait()
        restored = checkpoints.restore(fresh)
    assert restored is not None
    for mine, theirs in zip(
        jax.tree.leaves(after(restored.state, 4, 7)), jax.tree.leaves(after(halfway, 4, 7)), strict=True
    ):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def growing(params: Any) -> Any:
    return {"history": jnp.zeros((1,))}


@pytest.mark.parametrize(
    ("inner", "named"),
    [
        (
            optax.GradientTransformation(
                growing, lambda g, s, p=None: (g, {"history": jnp.concatenate([s["history"], jnp.ones(1)])})
            ),
            r"state .*\['history'\] was float32\[1\] and is float32\[2\]",
        ),
        (
            optax.GradientTransformation(growing, lambda g, s, p=None: (g, {"history": s["history"] > 0})),
            r"state .*\['history'\] was float32\[1\] and is bool\[1\]",
        ),
        (optax.GradientTransformation(growing, lambda g, s, p=None: (g, {**s, "more": s["history"]})), "has 2"),
        (
            optax.GradientTransformation(growing, lambda g, s, p=None: (jax.tree.map(jnp.sum, g), s)),
            r"changes .* was float32\[64, 32\] and is float32\[\]",
        ),
    ],
)
def test_an_optimizer_whose_state_or_changes_have_another_form_is_refused_by_name(inner: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"learner.optimizer.name is 'mine:grows'.*{named}"):
        keeping_shapes("mine:grows", inner).init(drawn(0))
