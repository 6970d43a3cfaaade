"""Wrappers of any optax transformation: keep its state in bfloat16, or refuse updates that change the state's shape.

Rounding is counter-based: the same updates give the same bits again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rollstream.topics.errors import ConfigurationError

_HALF_BITS = 16
"""Bits of a float32 that a bfloat16 lacks."""


class RoundedState(NamedTuple):
    """State of an optimizer whose arrays are kept in bfloat16."""

    updates: jax.Array
    """int32: number of updates made, which determines the random bits of the next rounding."""
    inner: Any
    """State of the optimizer."""


def in_bfloat16(inner: optax.GradientTransformation, seed: int = 0) -> optax.GradientTransformation:
    """Keep the float32 arrays of a state in bfloat16; updates are computed in float32.

    Arrays are rounded stochastically, up or down with probabilities that keep the mean: a second moment that changes by
    a thousandth at each update would never change if it were rounded to the nearest value. Scalars are not rounded.
    """

    def init(params: Any) -> RoundedState:
        state = inner.init(params)
        return RoundedState(jnp.zeros((), jnp.int32), jax.tree.map(_narrowed, state))

    def update(gradients: Any, state: RoundedState, params: Any = None) -> tuple[Any, RoundedState]:
        changes, after = inner.update(gradients, jax.tree.map(_widened, state.inner), params)
        key = jax.random.fold_in(jax.random.key(seed), state.updates)
        leaves, tree = jax.tree.flatten(after)
        rounded = [
            stochastically_rounded(leaf, jax.random.fold_in(key, number)) if _is_rounded(leaf) else leaf
            for number, leaf in enumerate(leaves)
        ]
        return changes, RoundedState(state.updates + 1, jax.tree.unflatten(tree, rounded))

    return optax.GradientTransformation(init, update)


def stochastically_rounded(values: jax.Array, key: jax.Array) -> jax.Array:
    """Round finite float32 values to one of the two nearest in bfloat16, so that the mean is the value itself."""
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> _HALF_BITS).astype(jnp.uint16), jnp.bfloat16)


def keeping_shapes(name: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Refuse a user's optimizer that a compiled step cannot run, when its state is created.

    `init` raises ConfigurationError if an update changes the shape or dtype of a part of the state, or returns changes
    whose shapes or dtypes are not those of the parameters.
    """

    def init(params: Any) -> Any:
        state = inner.init(params)
        changes, after = jax.eval_shape(inner.update, params, state, params)
        for what, before, now in (("state", state, after), ("changes", params, changes)):
            if difference := _first_difference(before, now):
                raise ConfigurationError(
                    f"learner.optimizer.name is {name!r}, whose update returns {what} of another form: {difference}; "
                    "return arrays of the same shapes and dtypes, in the same containers, at every update"
                )
        return state

    return optax.GradientTransformation(init, inner.update)


def _first_difference(before: Any, now: Any) -> str:
    """Describe the first array whose shape or dtype differs; empty if there is none."""
    then_leaves, then = jax.tree_util.tree_flatten_with_path(before)
    now_leaves, after = jax.tree_util.tree_flatten_with_path(now)
    for (path, old), (_, new) in zip(then_leaves, now_leaves, strict=False):
        if (form := _form(old)) != _form(new):
            return f"{jax.tree_util.keystr(path)} was {form} and is {_form(new)}"
    same: bool = then == after  # type: ignore[operator]
    return "" if same else f"it had {len(then_leaves)} arrays and has {len(now_leaves)}, or its containers differ"


def _form(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _is_rounded(leaf: jax.Array) -> bool:
    return leaf.dtype == jnp.float32 and leaf.ndim > 0


def _narrowed(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if _is_rounded(leaf) else leaf


def _widened(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
