"""Bounds on what a rollout may say of itself, by environment: what lies beyond them is refused before it is grouped.

The defaults refuse what is absurd anywhere; what a reward or a length may be is the environment's affair.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from topics.errors import ConfigurationError
from topics.records import Rollout


class Bounds(NamedTuple):
    """Least and most of each, themselves included."""

    min_reward: float
    max_reward: float
    min_temperature: float
    """Of sampling that is not greedy: a temperature of 0 is always within bounds."""
    max_temperature: float
    vocabulary_size: int
    """Token ids are below it."""
    max_tokens: int

    def check(self, where: str) -> None:
        """Raise ConfigurationError where nothing can lie within."""
        for low, high in ((self.min_reward, self.max_reward), (self.min_temperature, self.max_temperature)):
            if not -np.inf < low <= high < np.inf:
                raise ConfigurationError(f"{where}: {low:g} to {high:g} is no range of finite numbers")
        if self.min_temperature <= 0:
            raise ConfigurationError(f"{where}: min_temperature is {self.min_temperature:g}; it must be above 0")
        if self.vocabulary_size < 1 or self.max_tokens < 1:
            raise ConfigurationError(f"{where}: vocabulary_size and max_tokens must be at least 1")

    def excess(self, rollout: Rollout) -> str:
        """What of a sound rollout lies beyond which bound; "" where all of it is within."""
        temperature, length = rollout.sampling.temperature, len(rollout.tokens)
        most = int(np.maximum.reduce(rollout.tokens))
        if rollout.reward < self.min_reward:
            what = f"reward {rollout.reward:g} is below grouping.min_reward {self.min_reward:g}"
        elif rollout.reward > self.max_reward:
            what = f"reward {rollout.reward:g} is above grouping.max_reward {self.max_reward:g}"
        elif 0 < temperature < self.min_temperature:
            what = f"temperature {temperature:g} is below grouping.min_temperature {self.min_temperature:g}"
        elif temperature > self.max_temperature:
            what = f"temperature {temperature:g} is above grouping.max_temperature {self.max_temperature:g}"
        elif most >= self.vocabulary_size:
            what = f"token id {most} is not below grouping.vocabulary_size {self.vocabulary_size}"
        elif length > self.max_tokens:
            what = f"{length} tokens are more than grouping.max_tokens {self.max_tokens}"
        else:
            return ""
        return f"{what}, in environment {rollout.environment}"


BOUNDS = Bounds._fields
"""Settings of grouping that bound rollouts."""


def by_environment(texts: Iterable[str], default: Bounds) -> Mapping[str, Bounds]:
    """Read `ENVIRONMENT:KEY=VALUE`, one bound each. Raises ConfigurationError for anything else."""
    found: dict[str, Bounds] = {}
    for text in texts:
        environment, _, assignment = text.rpartition(":")
        key, _, value = assignment.partition("=")
        if not environment or key not in BOUNDS:
            raise ConfigurationError(
                f"grouping.bounds: {text!r} bounds nothing; write ENVIRONMENT:KEY=VALUE, e.g. gsm8k:max_reward=1, with "
                f"one of {', '.join(BOUNDS)}"
            )
        kind = type(getattr(default, key))
        try:
            number = kind(value)
        except ValueError as error:
            expected = "a whole number" if kind is int else "a number"
            raise ConfigurationError(f"grouping.bounds: {text!r} gives {key} {value!r}, not {expected}") from error
        found[environment] = found.get(environment, default)._replace(**{key: number})
    for environment, bounds in found.items():
        bounds.check(f"grouping.bounds of {environment}")
    return found
