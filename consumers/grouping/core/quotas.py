"""Quotas of single environments. An environment that exceeds a quota loses groups; other environments lose none."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rollstream.topics.errors import ConfigurationError

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
