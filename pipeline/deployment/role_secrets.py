"""The secrets that a role of a run is given: those of its connection to Kafka, and those that it uses itself."""

from collections.abc import Collection

from rollstream.pipeline.config import RunConfig, secret_references, secret_variables

_CONNECTION = ("kafka.client.", "kafka.registry.")


def secrets_of(config: RunConfig, used: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Kind (env or file) and name of each secret of a process, by dotted key; `used` are keys beside its connection."""
    references = secret_references(config).items()
    return {key: parts for key, parts in references if key in used or key.startswith(_CONNECTION)}


def withheld_variables(config: RunConfig, used: Collection[str]) -> frozenset[str]:
    """Environment variables that hold secrets of the run, and none that a process with these keys uses."""
    given = {name for kind, name in secrets_of(config, used).values() if kind == "env"}
    return secret_variables(config) - given
