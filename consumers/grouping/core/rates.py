"""Limits on the rates at which environments write: a token bucket for each environment, in the broker's time.

Stream time would stand still after a clock that had jumped ahead. Levels are integers, so they are identical after any
crash. They are part of the state at the position, because records that are read again have already used up their share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rollstream.consumers.grouping.core.quotas import UNLIMITED, Quota
from rollstream.topics.records import RateLevel

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
