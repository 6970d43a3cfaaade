"""Parameters of a training step: those that are trained, with and without adapters, and those of the teacher."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.parallel import mesh as layout
from rollstream.consumers.models import parameters
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.huggingface import load_config
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


LogProbsOf = Callable[[DecoderConfig, Any], Any]
"""Compiles the log-probabilities of a model whose parameters have the given shardings."""


class Teacher:
    """The teacher of a learner, without its parameters: they are given to `TrainStep.train`."""

    def __init__(self, directory: str, mesh: Mesh, dtype: str, log_probs_of: LogProbsOf) -> None:
        """Read the shape of the model in `directory`; its parameters are held in `dtype`."""
        self.model = load_config(directory)
        shapes: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]
            for name, shape in parameters.shapes(self.model).items()
        }
        self.shardings = layout.of_params(mesh, shapes)
        self.log_probs = log_probs_of(self.model, self.shardings)
        """Function of parameters and a microbatch, which returns log-probabilities."""
        self.abstract_params: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.shardings[name])  # type: ignore[no-untyped-call]
            for name, leaf in shapes.items()
        }
        """Shapes, dtypes and shardings of the teacher's parameters."""


def teacher_of(config: LearnerConfig, mesh: Mesh, log_probs_of: LogProbsOf) -> Teacher | None:
    """Return the teacher of a learner, if it has one."""
    return Teacher(config.teacher, mesh, config.compute_dtype, log_probs_of) if config.teacher else None
