"""Quotas of single environments: beyond them an environment loses groups of its own, and no other environment any."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rollstream.topics.errors import ConfigurationError

UNLIMITED = 2**63 - 1
MOST_RATES = 500
"""Most environments with a quota of a rate: each journal record has the level of every one."""


class Quota(NamedTuple):
    """Most that the rollouts of an environment may take on one partition."""

    open_groups: int = UNLIMITED
    """Groups that collect members."""
    held_bytes: int = UNLIMITED
    """Memory of its unfinished groups, as grouping.capacity_bytes counts it."""
    rollouts_per_s: int = UNLIMITED
    """Rollouts a second of stream time, on average."""
    bytes_per_s: int = UNLIMITED
    """Bytes of its records a second of stream time, on average."""

    @property
    def limits_rates(self) -> bool:
        """Whether it is a quota of a rate, too."""
        return min(self.rollouts_per_s, self.bytes_per_s) < UNLIMITED


NO_QUOTA = Quota()


def parse_quotas(texts: Iterable[str]) -> Mapping[str, Quota]:
    """Parse quotas, one each in the form `ENVIRONMENT:KEY=NUMBER`. Raises ConfigurationError for anything else, and for
    rates of more than `MOST_RATES` environments."""
    by_environment: dict[str, Quota] = {}
    for text in texts:
        environment, _, assignment = text.rpartition(":")
        key, _, value = assignment.partition("=")
        if not environment or key not in Quota._fields or not (value.isascii() and value.isdigit() and int(value)):
            raise ConfigurationError(
                f"grouping.quotas: {text[:100]!r} limits nothing; write ENVIRONMENT:KEY=NUMBER, e.g. "
                f"gsm8k:open_groups=1000, with one of {', '.join(Quota._fields)} and a whole number above 0"
            )
        quota = by_environment.get(environment, NO_QUOTA)
        by_environment[environment] = quota._replace(**{key: min(int(value), UNLIMITED)})
    if (rates := sum(quota.limits_rates for quota in by_environment.values())) > MOST_RATES:
        raise ConfigurationError(f"grouping.quotas limits the rates of {rates} environments, at most {MOST_RATES}")
    return by_environment
