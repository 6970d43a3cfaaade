"""Imports users' losses, schedules and optimizers that the settings name. The module itself imports no JAX.

Steps on record name them with the digest of their source, so that retraining and a restarted learner notice changed
code.
"""

from collections.abc import Callable
from typing import Any, get_args

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import (
    LOSSES,
    OPTIMIZERS,
    RECIPES,
    SCHEDULES,
    Optimizer,
    Schedule,
)
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.user_code import load_plug_in, source_digest


def user_loss(name: str) -> Callable[..., Any]:
    """Import a user's loss. Raises ConfigurationError if the name does not refer to a function."""
    return _imported(
        name, LOSSES, "learner.loss.name or learner.losses names", "a loss is named package.module:function"
    )


def user_schedule(name: str) -> Callable[..., Any]:
    """Import a user's schedule, as `user_loss` does."""
    return _imported(name, SCHEDULES, "learner.optimizer.schedule is", "a schedule is named package.module:function")


def user_optimizer(name: str) -> Callable[..., Any]:
    """Import a user's optimizer, as `user_loss` does."""
    return _imported(name, OPTIMIZERS, "learner.optimizer.name is", "an optimizer is named package.module:function")


def code_of(config: LearnerConfig) -> dict[str, str]:
    """Return the users' code that steps are computed with: for each setting, its name and the digest of its source.

    Imports the code. Empty if the settings name only what ships with rollstream.
    """
    optimizer = config.optimizer
    named = (
        *(
            (f"learner.losses.{environment}" if environment else "learner.loss.name", loss.name, RECIPES, user_loss)
            for environment, loss in config.loss_of.items()
        ),
        ("learner.optimizer.name", optimizer.name, get_args(Optimizer), user_optimizer),
        ("learner.optimizer.schedule", optimizer.schedule, get_args(Schedule), user_schedule),
    )
    return {
        setting: f"{name} {source_digest(load(name))}".strip()
        for setting, name, shipped, load in named
        if name not in shipped
    }


def _imported(name: str, group: str, named_by: str, kind: str) -> Callable[..., Any]:
    function: Any = load_plug_in(name, group, named_by, kind)
    if not callable(function):
        raise ConfigurationError(
            f"{named_by} {name!r}, which is not a function; see docs/losses.md#your-own-objectives"
        )
    imported: Callable[..., Any] = function
    return imported
