"""The secrets that a role of a run gets: for its connection to Kafka, and for the role itself."""

from collections.abc import Collection

from rollstream.pipeline.config import RunConfig, secret_references, secret_variables

_CONNECTION = ("kafka.client.", "kafka.registry.")


def secrets_of(config: RunConfig, used: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Return the kind (env or file) and name of each secret of a process, by dotted key.

    Every process gets the secrets of its connection to Kafka; `used` are more keys or, with a dot at the end, sections.
    """
    sections = (*_CONNECTION, *(name for name in used if name.endswith(".")))
    references = secret_references(config).items()
    return {key: parts for key, parts in references if key in used or key.startswith(sections)}


def withheld_variables(config: RunConfig, used: Collection[str]) -> frozenset[str]:
    """Return the environment variables with secrets of the run that a process with these keys does not use."""
    given = {name for kind, name in secrets_of(config, used).values() if kind == "env"}
    return secret_variables(config) - given
