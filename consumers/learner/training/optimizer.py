"""The optimizer and its schedule, built from settings, and the metrics of an update.

An update whose gradient is not finite is skipped: parameters, optimizer and schedule stay as they are, bit for bit, and
`optim/skipped` counts it. So is an update to which a user's optimizer or schedule gave changes that are not finite.

Rounding of a state in bfloat16 is counter-based: the same updates give the same bits again.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from rollstream.consumers.learner.objective import Optimizer, OptimizerConfig, Schedule
from rollstream.consumers.learner.user_objectives import user_optimizer, user_schedule
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


MUON_RMS = 0.2
"""Root mean square of muon's update per learning rate: equal to AdamW's (arXiv:2502.16982), for comparable rates."""


class GuardedState(NamedTuple):
    """State of an optimizer that skips updates whose gradient is not finite."""

    made: jax.Array
    """int32: number of updates made, which is the position in the schedule."""
    skipped: jax.Array
    """int32: number of updates skipped."""
    inner: Any
    """State of the optimizer."""


def make_schedule(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """Learning rate of update n, counted from 0: a linear rise, the configured schedule until `updates`, then constant.

    Update n of a warm-up of w updates has (n + 1) / (w + 1) of the rate, so that no update has rate 0. A user's
    schedule applies to all updates, including the warm-up.
    """
    if config.schedule not in get_args(Schedule):
        own: optax.Schedule = user_schedule(config.schedule)(config, updates)
        return own
    rate, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_updates
    length = max(updates - warmup, 1)
    main = {
        "cosine": optax.cosine_decay_schedule(rate, length, alpha=final / rate),
        "linear": optax.linear_schedule(rate, final, length),
        "constant": optax.constant_schedule(rate),
    }[config.schedule]
    if not warmup:
        return main
    return optax.join_schedules([optax.linear_schedule(rate / (warmup + 1), rate, warmup), main], [warmup])


def make_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """The optimizer, after global-norm clipping, for parameters by Hugging Face name; its state is a GuardedState.

    AdamW (arXiv:1711.05101), Adam (1412.6980), SGD, Lion (2302.06675), Muon (kellerjordan.github.io/posts/muon; scaled
    as in 2502.16982) or Adafactor (1804.04235), or a user's function of the settings and the schedule. Weight
    decay, which Adam and SGD do not have, is the learning rate times weight_decay.
    """
    schedule = make_schedule(config, updates)
    direction = _direction(config, schedule)
    parts = [in_bfloat16(direction) if config.state_dtype == "bfloat16" else direction]
    if config.max_grad_norm:
        parts.insert(0, optax.clip_by_global_norm(config.max_grad_norm))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(lambda made: -config.weight_decay * schedule(made), mask=decays))
    shipped = config.name in get_args(Optimizer) and config.schedule in get_args(Schedule)
    return skip_nonfinite(optax.chain(*parts), check_changes=not shipped)


def skip_nonfinite(inner: optax.GradientTransformation, *, check_changes: bool) -> optax.GradientTransformation:
    """Wrap `inner` so that a gradient whose global norm is not finite changes only the count of skipped updates.

    With `check_changes`, so does an update of which any change is not finite. The settings of our own optimizers are
    checked instead: with this check the compiler could not update moments in place, but would keep old and new ones.
    """

    def init(params: Any) -> GuardedState:
        return GuardedState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), inner.init(params))

    def update(gradients: Any, state: GuardedState, params: Any = None) -> tuple[Any, GuardedState]:
        finite = jnp.isfinite(optax.global_norm(gradients))
        clean = jax.tree.map(lambda gradient: jnp.where(finite, gradient, 0), gradients)
        changes, after = inner.update(clean, state.inner, params)
        if check_changes:
            finite &= jnp.stack([jnp.isfinite(change).all() for change in jax.tree.leaves(changes)]).all()
        changes = jax.tree.map(lambda change: jnp.where(finite, change, 0), changes)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state.inner)
        made = finite.astype(jnp.int32)
        return changes, GuardedState(state.made + made, state.skipped + 1 - made, after)

    return optax.GradientTransformation(init, update)


def update_metrics(
    schedule: optax.Schedule, gradients: Any, before: GuardedState, after: GuardedState
) -> dict[str, jax.Array]:
    """Metrics of one update, float32: gradient norm, learning rate, and 1 if the update was skipped."""
    return {
        "optim/grad_norm": optax.global_norm(gradients),
        "optim/lr": jnp.asarray(schedule(before.made), jnp.float32),
        "optim/skipped": (after.skipped - before.skipped).astype(jnp.float32),
    }


def decays(params: Mapping[str, Any]) -> dict[str, bool]:
    """Whether weight decay applies to each parameter: to matrices, not to norms and biases."""
    return {name: not name.endswith(("norm.weight", "bias")) for name in params}


def _direction(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The update without clipping and decay."""
    if config.name not in get_args(Optimizer):
        own: optax.GradientTransformation = user_optimizer(config.name)(config, schedule)
        return keeping_shapes(config.name, own)
    if config.name == "sgd":
        return optax.sgd(schedule, momentum=config.beta1 or None)
    if config.name == "lion":
        return optax.lion(schedule, b1=config.beta1, b2=config.beta2, weight_decay=0.0)
    if config.name == "adafactor":
        return optax.adafactor(schedule)
    adam = optax.adam(schedule, b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    if config.name != "muon":
        return adam
    muon = optax.contrib.muon(
        schedule,
        beta=config.beta1,
        consistent_rms=MUON_RMS,
        # Projections are [out, in].
        muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0),
    )
    return optax.partition({"muon": muon, "adam": adam}, _labels)


def _labels(params: Mapping[str, Any]) -> dict[str, str]:
    """Optimizer of each parameter: muon for the matrices of blocks, adam for embedding, head, norms and biases."""
    matrices = decays(params)
    return {name: "muon" if matrices[name] and name.startswith("model.layers.") else "adam" for name in params}
