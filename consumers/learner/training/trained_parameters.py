"""The parameters that are trained, with and without adapters, and gradients of these parameters only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.models.parameters import is_adapter


def trained_in_steps(config: LearnerConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the parameters that steps train: the adapters if there are any, else all."""
    return tuple(name for name in names if not config.model.lora.rank or is_adapter(name))


def trained_in_warm_start(config: LearnerConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the parameters that the warm start trains: those of the steps, or all but adapters in a random model.

    Adapters cannot make up for random parameters, and need no training while all other parameters are trained.
    """
    if config.pretrained:
        return trained_in_steps(config, names)
    return tuple(name for name in names if not is_adapter(name))


def chosen(params: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the entries with these names; entries are parameters, or values kept for each parameter."""
    return {name: params[name] for name in names}


def gradient_in(loss: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return a function of parameters and keywords: the gradient of `loss` with respect to `names`, and metrics."""

    def partly(own: Mapping[str, Any], params: Mapping[str, Any], **others: Any) -> Any:
        return loss({**params, **own}, **others)

    gradient = jax.grad(partly, has_aux=True)
    return lambda params, **others: gradient(chosen(params, names), params, **others)
