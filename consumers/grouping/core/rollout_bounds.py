"""Bounds on the numbers of a rollout, by environment: rollouts beyond them are dropped before they are grouped.

The defaults only refuse numbers that are absurd in every environment, because the range of rewards and lengths depends
on the environment.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.topics.errors import ConfigurationError


class Bounds(NamedTuple):
    """Lower and upper bounds, inclusive."""

    min_reward: float
    max_reward: float
    min_temperature: float
    """Minimum temperature of sampling that is not greedy; 0 is always within bounds."""
    max_temperature: float
    vocabulary_size: int
    """Greatest token id plus one."""
    max_tokens: int

    def check(self, where: str) -> None:
        """Raise ConfigurationError if no rollout can lie within the bounds."""
        for low, high in ((self.min_reward, self.max_reward), (self.min_temperature, self.max_temperature)):
            if not -np.inf < low <= high < np.inf:
                raise ConfigurationError(f"{where}: {low:g} to {high:g} is not a range of finite numbers")
        if self.min_temperature <= 0:
            raise ConfigurationError(f"{where}: min_temperature is {self.min_temperature:g}; it must be above 0")
        if self.vocabulary_size < 1 or self.max_tokens < 1:
            raise ConfigurationError(f"{where}: vocabulary_size and max_tokens must be at least 1")

    def excess(self, rollout: HeldRollout) -> str:
        """Describe the number of a valid rollout that lies beyond a bound; "" if all numbers are within bounds."""
        temperature, length = rollout.temperature, rollout.length
        most = rollout.token_bound
        if most >= self.vocabulary_size:
            most = int(np.maximum.reduce(rollout.tokens))
        if rollout.reward < self.min_reward:
            excess = f"reward {rollout.reward:g} is below grouping.min_reward {self.min_reward:g}"
        elif rollout.reward > self.max_reward:
            excess = f"reward {rollout.reward:g} is above grouping.max_reward {self.max_reward:g}"
        elif 0 < temperature < self.min_temperature:
            excess = f"temperature {temperature:g} is below grouping.min_temperature {self.min_temperature:g}"
        elif temperature > self.max_temperature:
            excess = f"temperature {temperature:g} is above grouping.max_temperature {self.max_temperature:g}"
        elif most >= self.vocabulary_size:
            excess = f"token id {most} is not below grouping.vocabulary_size {self.vocabulary_size}"
        elif length > self.max_tokens:
            excess = f"{length} tokens are more than grouping.max_tokens {self.max_tokens}"
        else:
            return ""
        return f"{excess}, in environment {rollout.environment}"


BOUNDS = Bounds._fields
"""Names of the settings that bound rollouts."""


def parse_bounds(texts: Iterable[str], default: Bounds) -> Mapping[str, Bounds]:
    """Parse bounds of single environments of the form `ENVIRONMENT:KEY=VALUE`.

    Raises ConfigurationError for a text of any other form, and for bounds that no rollout can meet.
    """
    by_environment: dict[str, Bounds] = {}
    for text in texts:
        environment, _, assignment = text.rpartition(":")
        key, _, value = assignment.partition("=")
        if not environment or key not in BOUNDS:
            raise ConfigurationError(
                f"grouping.bounds: {text!r} is not a bound; write ENVIRONMENT:KEY=VALUE, e.g. gsm8k:max_reward=1, with "
                f"one of {', '.join(BOUNDS)}"
            )
        kind = type(getattr(default, key))
        try:
            number = kind(value)
        except ValueError as error:
            expected = "a whole number" if kind is int else "a number"
            raise ConfigurationError(f"grouping.bounds: {text!r} gives {key} {value!r}, not {expected}") from error
        by_environment[environment] = by_environment.get(environment, default)._replace(**{key: number})
    for environment, bounds in by_environment.items():
        bounds.check(f"grouping.bounds of {environment}")
    return by_environment
