"""Optimizers against their papers' updates in numpy, schedules by their figures, and what a bad gradient may do."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition
from rollstream.consumers.learner.config import CheckpointConfig
from rollstream.consumers.learner.objective import OptimizerConfig
from rollstream.consumers.learner.records.checkpoints import Checkpoints
from rollstream.consumers.learner.training.optimizer import (
    in_bfloat16,
    keeping_shapes,
    make_optimizer,
    make_schedule,
    skip_nonfinite,
    stochastically_rounded,
    update_metrics,
)
from rollstream.consumers.learner.training.train_step import TrainState
from rollstream.topics.errors import ConfigurationError

WEIGHT, NORM, BIAS, EMBEDDING = (
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.embed_tokens.weight",
)
SHAPES = {WEIGHT: (6, 4), NORM: (4,), BIAS: (6,), EMBEDDING: (9, 4)}

Arrays = dict[str, np.ndarray]


def drawn(seed: int, scale: float = 1.0) -> Arrays:
    draw = np.random.default_rng(seed)
    return {name: (scale * draw.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


@cache
def compiled(config: OptimizerConfig) -> tuple[Any, Any]:
    """An optimizer of 10 updates: its initial state, and a step from (params, state, gradient) to (params, state)."""
    optimizer = make_optimizer(config, 10)

    @jax.jit
    def step(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state

    return jax.jit(optimizer.init)(drawn(0)), step


def run(config: OptimizerConfig, gradients: list[Arrays]) -> tuple[Arrays, Any]:
    params: Any = drawn(0)
    state, step = compiled(config)
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return {name: np.asarray(value) for name, value in params.items()}, state


def clipped(gradient: Arrays, norm: float) -> Arrays:
    total = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in gradient.values()))
    return {name: value * min(1.0, norm / total) for name, value in gradient.items()}


def test_adamw_makes_the_updates_of_its_paper() -> None:
    config = OptimizerConfig(learning_rate=0.1, final_learning_rate=0.01, warmup_updates=2, weight_decay=0.3)
    gradients = [drawn(seed, scale) for seed, scale in ((1, 3.0), (2, 1e-2), (3, 1.0), (4, 0.1))]
    rates = [0.1 / 3, 0.2 / 3, 0.1, 0.01 + 0.09 * (1 + np.cos(np.pi / 8)) / 2]
    params: Arrays = {name: value.astype(np.float64) for name, value in drawn(0).items()}
    m, v = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for n, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        for name, g in clipped(gradient, 1.0).items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            step = (m[name] / (1 - 0.9**n)) / (np.sqrt(v[name] / (1 - 0.95**n)) + 1e-8)
            decay = 0.3 * params[name] if name in (WEIGHT, EMBEDDING) else 0.0
            params[name] = params[name] - rate * (step + decay)
    actual, state = run(config, gradients)
    for name, value in params.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, atol=2e-6)
    assert (int(state.made), int(state.skipped)) == (4, 0)


def test_sgd_and_lion_make_the_updates_of_their_papers() -> None:
    gradients = [drawn(seed) for seed in (1, 2, 3)]
    common = {"learning_rate": 0.1, "schedule": "constant", "max_grad_norm": 0.0, "beta1": 0.8, "beta2": 0.7}
    of_sgd, of_lion = drawn(0), drawn(0)
    velocity, momentum = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for gradient in gradients:
        for name, g in gradient.items():
            velocity[name] = 0.8 * velocity[name] + g
            of_sgd[name] = of_sgd[name] - 0.1 * velocity[name]
            decay = 0.5 * of_lion[name] if name in (WEIGHT, EMBEDDING) else 0.0
            of_lion[name] = of_lion[name] - 0.1 * (np.sign(0.8 * momentum[name] + 0.2 * g) + decay)
            momentum[name] = 0.7 * momentum[name] + 0.3 * g
    sgd, _ = run(OptimizerConfig(name="sgd", **common), gradients)
    lion, _ = run(OptimizerConfig(name="lion", weight_decay=0.5, **common), gradients)
    for name in SHAPES:
        np.testing.assert_allclose(sgd[name], of_sgd[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lion[name], of_lion[name], rtol=1e-5, atol=1e-6)


def test_muon_orthogonalises_the_matrices_of_blocks_and_leaves_the_rest_to_adam() -> None:
    common = {"learning_rate": 0.1, "schedule": "constant", "max_grad_norm": 0.0}
    gradients = [drawn(1)]
    muon, _ = run(OptimizerConfig(name="muon", **common), gradients)
    adam, _ = run(OptimizerConfig(name="adam", **common), gradients)
    for name in (NORM, BIAS, EMBEDDING):
        np.testing.assert_allclose(muon[name], adam[name], rtol=1e-5, atol=1e-7)
    change = (drawn(0)[WEIGHT] - muon[WEIGHT]) / 0.1
    singular = np.linalg.svd(change / (0.2 * np.sqrt(6)), compute_uv=False)
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_adafactor_goes_downhill() -> None:
    """The loss is the squared distance from another point."""
    state, step = compiled(OptimizerConfig(name="adafactor"))
    target, params = drawn(1), drawn(0)

    def distance(params: Any) -> float:
        return sum(float(np.square(params[name] - target[name]).sum()) for name in SHAPES)

    distances = [distance(params)]
    for _ in range(10):
        params, state = step(params, state, {name: 2 * (params[name] - target[name]) for name in SHAPES})
        distances.append(distance(params))
    assert all(later < earlier for earlier, later in pairwise(distances))


@pytest.mark.parametrize("rate", ["cosine", "linear", "constant"])
def test_a_schedule_rises_without_an_update_at_zero_and_ends_where_it_says(rate: Any) -> None:
    config = OptimizerConfig(learning_rate=1.0, final_learning_rate=0.2, schedule=rate, warmup_updates=4)
    schedule = make_schedule(config, 104)
    rates = [float(schedule(n)) for n in (0, 1, 4, 54, 104, 500)]
    end = 1.0 if rate == "constant" else 0.2
    half = 1.0 if rate == "constant" else 0.6
    assert rates == pytest.approx([0.2, 0.4, 1.0, half, end, end], abs=1e-6)


def test_the_default_schedule_falls_by_cosine_and_stays() -> None:
    schedule = make_schedule(OptimizerConfig(), 600)
    assert [float(schedule(n)) for n in (0, 300, 600, 900)] == pytest.approx([2e-3, 1.2e-3, 4e-4, 4e-4])


@pytest.mark.parametrize(
    ("name", "bad"), [("adamw", np.nan), ("adamw", np.inf), ("adamw", 3e38), ("adafactor", np.nan)]
)
def test_an_update_with_a_gradient_that_is_not_finite_changes_no_bit(name: Any, bad: float) -> None:
    """3e38 is finite but its square is not, so the norm that clipping divides by would be infinite."""
    config = OptimizerConfig(name=name)
    poisoned = drawn(2)
    poisoned[WEIGHT][3, 1] = bad
    without, plain = run(config, [drawn(1), drawn(3)])
    with_it, guarded = run(config, [drawn(1), poisoned, drawn(3)])
    for parameter in SHAPES:
        np.testing.assert_array_equal(with_it[parameter], without[parameter])
    assert (int(guarded.made), int(guarded.skipped)) == (2, 1)
    for mine, theirs in zip(jax.tree.leaves(guarded.inner), jax.tree.leaves(plain.inner), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_metrics_say_norm_rate_and_what_was_skipped() -> None:
    config = OptimizerConfig(learning_rate=1.0, final_learning_rate=0.0, schedule="linear")
    schedule, (state, step) = make_schedule(config, 10), compiled(config)
    params, collected = drawn(0), []
    for gradient in (drawn(1), {**drawn(2), NORM: np.full(4, np.nan, np.float32)}, drawn(3)):
        params, after = step(params, state, gradient)
        collected.append(
            {name: float(value) for name, value in update_metrics(schedule, gradient, state, after).items()}
        )
        state = after
    assert [figures["optim/skipped"] for figures in collected] == [0.0, 1.0, 0.0]
    assert [figures["optim/lr"] for figures in collected] == pytest.approx([1.0, 0.9, 0.9])
    norm = np.sqrt(sum(np.square(value).sum() for value in drawn(1).values()))
    assert collected[0]["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_changes_of_a_users_optimizer_that_are_not_finite_are_skipped_and_others_keep_their_bits() -> None:
    def spoiling(spoils: Any) -> optax.GradientTransformation:
        """Adam, but an update whose gradient `spoils` has a change that is not finite."""
        adam = optax.adam(0.1)

        def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            changes, state = adam.update(gradients, state, params)
            return {**changes, NORM: jax.numpy.where(spoils(gradients), np.inf, changes[NORM])}, state

        return optax.GradientTransformation(adam.init, update)

    def after(optimizer: optax.GradientTransformation, gradients: list[Arrays]) -> tuple[Any, Any]:
        params: Any = drawn(0)
        state: Any = optimizer.init(params)
        for gradient in gradients:
            # Operation by operation: compiled as a whole, the two optimizers may round differently.
            changes, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, changes)
        return params, state

    spoiled, marked = spoiling(lambda gradients: gradients[BIAS][0] == 7), drawn(2)
    marked[BIAS][0] = 7
    params, state = after(skip_nonfinite(spoiled, check_changes=True), [drawn(1), marked, drawn(3)])
    expected, plain = after(skip_nonfinite(spoiled, check_changes=False), [drawn(1), drawn(3)])
    assert (int(state.made), int(state.skipped)) == (2, 1)
    for mine, theirs in zip(
        jax.tree.leaves((params, state.inner)), jax.tree.leaves((expected, plain.inner)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_a_users_schedule_without_a_rate_changes_no_parameter(tmp_path: Path) -> None:
    (tmp_path / "rates.py").write_text("def none(config, updates):\n    return lambda update: update * float('nan')\n")
    actual, state = run(OptimizerConfig(schedule=f"{tmp_path}/rates.py:none"), [drawn(1)])
    np.testing.assert_array_equal(actual[WEIGHT], drawn(0)[WEIGHT])
    assert (int(state.made), int(state.skipped)) == (0, 1)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_least_and_greatest_settings_make_finite_updates(name: Any) -> None:
    """Without gradients, of values whose squares are 0 in float32, and of values whose squares are nearly infinite."""
    bounds = {"beta1": 1 - 1e-7, "beta2": 1 - 1e-7, "epsilon": 1e-30, "max_grad_norm": 0.0}
    for scale in (0.0, 1e-30, 1e-19, 1e18):
        actual, state = run(OptimizerConfig(name=name, **bounds), [drawn(seed, scale) for seed in (1, 2)])
        assert all(np.isfinite(value).all() for value in actual.values())
        assert all(np.isfinite(value).all() for value in jax.tree.leaves(state.inner))
        assert int(state.skipped) == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_grad_norm", -1.0),
        ("weight_decay", -0.1),
        ("weight_decay", np.inf),
        ("epsilon", 0.0),
        ("epsilon", 1e-50),
        ("beta1", 1.0),
        ("beta2", 1.0),
        ("beta2", 1 - 1e-9),
        ("beta2", -0.1),
        ("beta1", np.nan),
    ],
)
def test_settings_that_would_train_uphill_or_to_nan_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"learner\.optimizer\.{setting} is .*; it must be between"):
        OptimizerConfig(**{setting: value})  # type: ignore[arg-type]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no weight decay"):
        OptimizerConfig(name="sgd", weight_decay=0.1)
    with pytest.raises(ConfigurationError, match="rate above 0"):
        OptimizerConfig(learning_rate=0.0)
    with pytest.raises(ConfigurationError, match="all of them finite"):
        OptimizerConfig(learning_rate=np.inf)


SHAPES_OPTIMIZER_STATE = {"model.layers.0.mlp.up_proj.weight": (64, 32), "model.norm.weight": (32,)}


def drawn_of_optimizer_state(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES_OPTIMIZER_STATE.items()}


def size_of(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def distances(
    state_dtype: Any, name: Any = "adamw", updates: int = 60, beta2: float = 0.999
) -> tuple[list[float], Any]:
    """Distances from a target on the way to it, and the state at the end."""
    config = OptimizerConfig(name=name, learning_rate=0.05, schedule="constant", beta2=beta2, state_dtype=state_dtype)
    optimizer = make_optimizer(config, updates)
    params, target = drawn_of_optimizer_state(0), drawn_of_optimizer_state(1)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradient = jax.tree.map(lambda p, t: 2 * (p - t), params, target)
        changes, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
        return params, state, sum(jnp.square(params[n] - target[n]).sum() for n in SHAPES_OPTIMIZER_STATE)

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
            changes, inner = step(drawn_of_optimizer_state(seed), state.optimizer, state.params)
            params = optax.apply_updates(state.params, changes)
            state = state._replace(params=params, optimizer=inner, step=state.step + 1)
        return state

    params = jax.tree.map(jnp.asarray, drawn_of_optimizer_state(0))
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
        keeping_shapes("mine:grows", inner).init(drawn_of_optimizer_state(0))
