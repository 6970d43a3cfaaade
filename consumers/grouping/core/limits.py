"""Limits of single environments: quotas, bounds on the numbers of a rollout, and rates at which an environment writes.

Groups or rollouts beyond a limit are dropped; other environments lose none. The default bounds only refuse numbers that
are absurd in every environment, because the range of rewards and lengths depends on the environment.

Rates are in the broker's time: stream time would stand still after a clock that had jumped ahead. Levels are integers,
so they are identical after any crash. They are part of the state at the position, because records that are read again
have already used up their share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import RateLevel

UNLIMITED = 2**63 - 1
MOST_RATES = 500
"""Maximum number of environments with a rate quota, because each journal record holds all their levels."""


class Quota(NamedTuple):
    """Limits for the rollouts of one environment on one partition."""

    open_groups: int = UNLIMITED
    """Number of groups that collect members."""
    held_bytes: int = UNLIMITED
    """Memory of unfinished groups, as grouping.capacity_bytes counts it."""
    rollouts_per_s: int = UNLIMITED
    """Average number of rollouts per second of stream time."""
    bytes_per_s: int = UNLIMITED
    """Average number of bytes in rollout records per second of stream time."""

    @property
    def limits_rates(self) -> bool:
        """Whether a rate is limited."""
        return min(self.rollouts_per_s, self.bytes_per_s) < UNLIMITED


NO_QUOTA = Quota()


def parse_quotas(texts: Iterable[str]) -> Mapping[str, Quota]:
    """Parse quotas of the form `ENVIRONMENT:KEY=NUMBER`. Raises ConfigurationError for a text of any other form, and if
    there are rate quotas for more than `MOST_RATES` environments."""
    by_environment: dict[str, Quota] = {}
    for text in texts:
        environment, _, assignment = text.rpartition(":")
        key, _, value = assignment.partition("=")
        if not environment or key not in Quota._fields or not (value.isascii() and value.isdigit() and int(value)):
            raise ConfigurationError(
                f"grouping.quotas: {text[:100]!r} is not a quota; write ENVIRONMENT:KEY=NUMBER, e.g. "
                f"gsm8k:open_groups=1000, with one of {', '.join(Quota._fields)} and a whole number above 0"
            )
        quota = by_environment.get(environment, NO_QUOTA)
        by_environment[environment] = quota._replace(**{key: min(int(value), UNLIMITED)})
    if (rates := sum(quota.limits_rates for quota in by_environment.values())) > MOST_RATES:
        raise ConfigurationError(f"grouping.quotas limits rates of {rates} environments; limit at most {MOST_RATES}")
    return by_environment


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


BURST_S = 60
"""Seconds of its rate that an environment may write at once after a pause, because groups arrive in bursts."""
_UNIT = 1000
"""Levels are in thousandths, as stream time is in thousandths of a second."""


class Rates:
    """Levels of the rate quotas of one partition, by environment."""

    def __init__(self, levels: Iterable[RateLevel] = ()) -> None:
        self._levels = {level.environment: level for level in levels}

    @property
    def levels(self) -> tuple[RateLevel, ...]:
        """Levels of the environments that have written under a rate quota, ordered by name."""
        return tuple(self._levels[environment] for environment in sorted(self._levels))

    def exceeded(self, environment: str, quota: Quota, size_bytes: int, now_ms: int) -> str:
        """Use up the share of a record of `size_bytes` and return ""; if it would exceed a quota, return that quota."""
        if not quota.limits_rates:
            return ""
        last = self._levels.get(environment) or RateLevel(
            environment=environment, rollouts=UNLIMITED, bytes=UNLIMITED, at_ms=now_ms
        )
        if now_ms < last.at_ms:
            # A clock of the broker that had jumped ahead is back: the time until then would refill nothing.
            last = self._levels[environment] = replace(last, at_ms=now_ms)
        elapsed_ms = now_ms - last.at_ms
        levels = []
        for key, rate, before, share in (
            ("rollouts_per_s", quota.rollouts_per_s, last.rollouts, 1),
            ("bytes_per_s", quota.bytes_per_s, last.bytes, size_bytes),
        ):
            if rate == UNLIMITED:
                levels.append(UNLIMITED)
                continue
            left = min(BURST_S * _UNIT * rate, before + elapsed_ms * rate, UNLIMITED) - share * _UNIT
            if left < 0:
                return f"{environment}:{key}={rate}"
            levels.append(left)
        self._levels[environment] = RateLevel(
            environment=environment, rollouts=levels[0], bytes=levels[1], at_ms=now_ms
        )
        return ""

    def keep(self, quotas: Mapping[str, Quota]) -> None:
        """Forget the levels of environments that no longer have a rate quota."""
        self._levels = {
            environment: level
            for environment, level in self._levels.items()
            if environment in quotas and quotas[environment].limits_rates
        }
