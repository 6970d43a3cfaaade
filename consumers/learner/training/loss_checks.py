"""The checks behind `rollstream.check_loss`: central differences, untrained tokens, splits and the policy gradient.

Everything is computed in float64, on sequences drawn from a seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpy.typing import NDArray

from rollstream.consumers.learner.objective import LossConfig, denominator_of, token_weight
from rollstream.consumers.learner.training.loss import policy_loss_of
from rollstream.consumers.learner.training.surrogates import Surrogate, UserLoss, surrogate_of, whole

Floats = NDArray[np.float64]

_ROW = 40
"""Tokens of a row; five sequences fit."""
_STEP = 1e-6
_TOLERANCE = 1e-6
_RUBBISH = -7.0
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
"""Primitives that evaluate a traced function."""


@dataclass(frozen=True)
class _Sequence:
    """Arrays [tokens] of one made-up sequence."""

    mask: NDArray[np.bool_]
    learner: Floats
    generator: Floats
    proximal: Floats
    reference: Floats
    entropy: Floats
    advantages: Floats


def check_all(loss: UserLoss | str, on_policy: bool, seed: int, settings: Mapping[str, Any]) -> None:
    """Run every check, as `rollstream.check_loss` describes."""
    surrogate = surrogate_of(loss) if isinstance(loss, str) else whole(loss)
    config = LossConfig(name=loss if isinstance(loss, str) else "its:own", **settings)
    draw = np.random.default_rng(seed)
    sequences = [_made_up(draw) for _ in range(9)]
    check_gradient(surrogate, config, sequences)
    check_untrained_tokens(surrogate, config, sequences)
    check_splits(surrogate, config, sequences)
    if on_policy:
        check_policy_gradient(surrogate, config, sequences)


def check_gradient(surrogate: Surrogate, config: LossConfig, sequences: Sequence[_Sequence]) -> None:
    """Check the gradient against central differences in every log-probability."""
    batch = _rows(sequences, [[index] for index in range(len(sequences))], config)
    learner = batch.pop("learner")
    with jax.enable_x64(True):
        value = _value(surrogate, config, batch, sequences)
        gradient = np.asarray(jax.grad(value)(learner))
        places = list(zip(*np.nonzero(batch["loss_mask"][:, 1:]), strict=True))
        steps = np.zeros((len(places), *learner.shape))
        for number, place in enumerate(places):
            steps[number][place] = _STEP
        objective = jax.jit(jax.vmap(_holding(value, learner)))
        differences = (np.asarray(objective(learner + steps)) - np.asarray(objective(learner - steps))) / (2 * _STEP)
    for place, difference in zip(places, differences, strict=True):
        assert abs(gradient[place] - difference) <= _TOLERANCE, (
            f"the gradient of the loss is {gradient[place]:.6g} where its value changes by {difference:.6g}, "
            f"at token {place[1] + 1} of sequence {place[0]}"
        )


def check_untrained_tokens(surrogate: Surrogate, config: LossConfig, sequences: Sequence[_Sequence]) -> None:
    """Check that tokens that are not trained have no gradient, and that the values there have no effect."""
    layout = [list(range(0, len(sequences), 2)), list(range(1, len(sequences), 2))]
    results = []
    for rubbish in (0.0, _RUBBISH):
        batch = _rows(sequences, layout, config, rubbish)
        learner = batch.pop("learner")
        with jax.enable_x64(True):
            value, gradient = jax.value_and_grad(_value(surrogate, config, batch, sequences))(learner)
        outside = np.asarray(gradient)[batch["loss_mask"][:, 1:] == 0]
        assert not outside.any(), "a token that is not trained has a gradient: multiply by tokens.mask"
        results.append((float(value), np.asarray(gradient)))
    (clean, of_clean), (dirty, of_dirty) = results
    assert clean == dirty, f"values at untrained tokens change the loss from {clean:.6g} to {dirty:.6g}"
    assert np.array_equal(of_clean, of_dirty), "values at untrained tokens change the gradient"


def check_splits(surrogate: Surrogate, config: LossConfig, sequences: Sequence[_Sequence]) -> None:
    """Check that rows and microbatches of another shape give the same value and gradient."""
    count = len(sequences)
    alone = [[[index] for index in range(count)]]
    packed = [[list(range(0, count, 3)), list(range(1, count, 3)), list(range(2, count, 3))]]
    split = [[list(range(0, count, 3))], [list(range(1, count, 3)), list(range(2, count, 3))[::-1]]]
    (value, gradients), *others = [_summed(surrogate, config, sequences, way) for way in (alone, packed, split)]
    for other, of_other in others:
        assert abs(value - other) <= _TOLERANCE, (
            f"the loss is {value:.6g} or {other:.6g} depending on how an update is packed: compute each token's loss "
            "from its own sequence alone (see tokens.segment_ids), and leave means to learner.loss.reduction"
        )
        for mine, theirs in zip(gradients, of_other, strict=True):
            assert np.allclose(mine, theirs, atol=_TOLERANCE), "the gradient depends on how an update is packed"


def check_policy_gradient(surrogate: Surrogate, config: LossConfig, sequences: Sequence[_Sequence]) -> None:
    """Check that at ratio 1 the gradient of a token is -A times its weight in the reduction."""
    plain = LossConfig(
        name=config.name,
        reduction=config.recipe.reduction,
        length_norm=config.recipe.length_norm or None,
        entropy_coefficient=0.0,
        importance_sampling="none",
    )
    level = [
        _Sequence(s.mask, s.learner, s.learner, s.learner, s.reference, s.entropy, np.full_like(s.advantages, mean))
        for s in sequences
        for mean in [float(s.advantages.mean())]
    ]
    _value_of, gradients = _summed(surrogate, plain, level, [[[index] for index in range(len(level))]])
    divisor = _denominators(level)[denominator_of(plain)]
    for sequence, gradient in zip(level, gradients, strict=True):
        weight = token_weight(plain, max(1, int(sequence.mask.sum()))) / divisor
        expected = np.where(sequence.mask, -sequence.advantages * weight, 0.0)
        assert np.allclose(gradient, expected, atol=_TOLERANCE), (
            f"with equal generator and learner, the gradient of a sequence is {gradient[sequence.mask]}, but "
            f"the policy gradient is {expected[sequence.mask]}; give on_policy=False if this is intended"
        )


def _made_up(draw: np.random.Generator) -> _Sequence:
    length = int(draw.integers(3, 8))
    mask = draw.random(length) < 0.7
    mask[0], mask[-1] = False, True
    learner = -draw.gamma(2.0, 1.0, length)
    around = [learner + spread * draw.normal(size=length) for spread in (0.4, 0.2, 0.4)]
    generator, proximal, reference = around
    entropy, advantages = draw.gamma(2.0, 0.5, length), draw.normal(size=length)
    return _Sequence(mask, learner, generator, proximal, reference, entropy, advantages)


def _rows(
    sequences: Sequence[_Sequence], layout: Sequence[Sequence[int]], config: LossConfig, rubbish: float = 0.0
) -> dict[str, Any]:
    """Arrays of a microbatch whose row r holds the sequences layout[r]; "learner" and "entropy" begin at token 1."""
    shape = (len(layout), _ROW)
    recorded = ("generator", "proximal", "reference", "advantages")
    arrays: dict[str, Any] = {name: np.full(shape, rubbish) for name in (*recorded, "loss_weights")}
    # A model gives finite values at every token, trained or not.
    arrays |= {"learner": np.full(shape, -3.0), "entropy": np.full(shape, 1.0), "loss_mask": np.zeros(shape)}
    arrays["segment_ids"] = np.zeros(shape, np.int32)
    for row, members in enumerate(layout):
        begin = 0
        for segment, index in enumerate(members, 1):
            sequence = sequences[index]
            where = row, slice(begin, begin + len(sequence.mask))
            arrays["segment_ids"][where], arrays["loss_mask"][where] = segment, sequence.mask
            weight = token_weight(config, max(1, int(sequence.mask.sum())))
            arrays["loss_weights"][where] = np.where(sequence.mask, weight, rubbish)
            for name in recorded:
                arrays[name][where] = np.where(sequence.mask, getattr(sequence, name), rubbish)
            for name in ("learner", "entropy"):
                arrays[name][where] = getattr(sequence, name)
            begin += len(sequence.mask)
    for name in ("generator", "proximal", "reference"):
        arrays[f"{name}_log_probs"] = arrays.pop(name)
    return {**arrays, "learner": arrays["learner"][:, 1:], "entropy": arrays["entropy"][:, 1:]}


def _denominators(sequences: Sequence[_Sequence]) -> dict[str, Any]:
    counts = {"tokens": sum(s.mask.sum() for s in sequences), "sequences": sum(s.mask.any() for s in sequences)}
    return {name: np.float64(max(1, count)) for name, count in counts.items()}


def _value(
    surrogate: Surrogate, config: LossConfig, batch: Mapping[str, Any], sequences: Sequence[_Sequence]
) -> Callable[[Any], Any]:
    """The loss as a function of the learner's log-probabilities."""
    given = dict(batch)
    entropy, denominators = given.pop("entropy"), _denominators(sequences)
    return lambda learner: policy_loss_of(learner, entropy, config, given, denominators, surrogate)[0]


def _summed(
    surrogate: Surrogate,
    config: LossConfig,
    sequences: Sequence[_Sequence],
    update: Sequence[Sequence[list[int]]],
) -> tuple[float, list[Floats]]:
    """Value of an `update`, given as layouts of microbatches, and the gradient of each sequence, [tokens]."""
    total, gradients = 0.0, [np.zeros(len(sequence.mask)) for sequence in sequences]
    for layout in update:
        batch = _rows(sequences, layout, config)
        learner = batch.pop("learner")
        with jax.enable_x64(True):
            value, gradient = jax.value_and_grad(_value(surrogate, config, batch, sequences))(learner)
        total += float(value)
        padded = np.pad(np.asarray(gradient), ((0, 0), (1, 0)))
        for row, members in enumerate(layout):
            begin = 0
            for index in members:
                length = len(sequences[index].mask)
                gradients[index] = padded[row, begin : begin + length]
                begin += length
    return total, gradients


# ---------------------------------------------------------------- stop_gradient


def _holding(function: Callable[[Any], Any], at: Any) -> Callable[[Any], Any]:
    """Return `function` with the arguments of `stop_gradient` held at their values for `at`."""
    closed = jax.make_jaxpr(function)(at)
    stopped_values: list[Any] = []
    _evaluate(closed, [at], stopped_values, None)

    def value(argument: Any) -> Any:
        return _evaluate(closed, [argument], [], iter(stopped_values))[0]

    return value


def _evaluate(closed: ClosedJaxpr, arguments: Sequence[Any], seen: list[Any], stopped_values: Any) -> list[Any]:
    """Evaluate a traced function; append `stop_gradient` inputs to `seen`; take its outputs from
    `stopped_values` if given."""
    jaxpr: Jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(variable) for variable in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name == "stop_gradient":
            seen.append(inputs[0])
            outputs: Any = [inputs[0] if stopped_values is None else next(stopped_values)]
        elif equation.primitive.name in _CALLS and isinstance(inner, ClosedJaxpr):
            outputs = _evaluate(inner, inputs, seen, stopped_values)
        else:
            bind: Callable[..., Any] = equation.primitive.bind
            outputs = bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]
