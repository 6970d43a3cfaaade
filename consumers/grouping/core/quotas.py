"""Quotas of single environments: beyond them an environment loses groups of its own, and no other environment any."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rollstream.topics.errors import ConfigurationError


class Quota(NamedTuple):
    """Most that the unfinished groups of an environment may take on one partition."""

    open_groups: int = 2**63 - 1
    """Groups that collect members."""
    held_bytes: int = 2**63 - 1
    """Memory of its unfinished groups, as grouping.capacity_bytes counts it."""


NO_QUOTA = Quota()


def parse_quotas(texts: Iterable[str]) -> Mapping[str, Quota]:
    """Parse quotas, one each in the form `ENVIRONMENT:KEY=NUMBER`. Raises ConfigurationError for anything else."""
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
        by_environment[environment] = quota._replace(**{key: min(int(value), 2**63 - 1)})
    return by_environment
