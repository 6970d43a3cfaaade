"""Keeps secrets out of configurations, logs and records: a setting holds a reference, resolved where it is used.

`env:NAME` is an environment variable, `file:PATH` a file. Only the parameters of a client or a request hold the secret
itself.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollstream.topics.errors import ConfigurationError

_SECRET = re.compile(r"(password|passphrase|secret|key\.pem|api_key|signing_key|^ui\.token)$")
_variables: set[str] = set()
"""Environment variables of this process that hold secrets of its configuration."""
_REFERENCE = re.compile(r"(?P<kind>env|file):(?P<name>.+)", re.DOTALL)


def is_secret(key: str) -> bool:
    """Whether a setting of this name, ours or librdkafka's, holds a secret."""
    return _SECRET.search(key) is not None


def reference(text: str) -> tuple[str, str] | None:
    """Return the kind (env or file) and name of a reference; None if the text is not a reference."""
    match = _REFERENCE.fullmatch(text)
    return (match["kind"], match["name"]) if match else None


def resolve(key: str, value: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the secret if the value of a secret setting is a reference, else the value.

    Raises ConfigurationError if the variable is not set or the file cannot be read.
    """
    parsed = reference(value) if is_secret(key) else None
    if parsed is None:
        return value
    kind, name = parsed
    if kind == "env":
        if name not in environment:
            raise ConfigurationError(f"{key} is {value}, but this environment variable is not set; export {name}")
        return environment[name]
    try:
        return Path(name).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{key} is {value}, which cannot be read: {error}") from error


def resolve_options(
    section: str, options: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return options with their secrets in place of the references, also in nested tables and lists.

    `section` is the setting that holds the options, such as `collect.options`. Raises as `resolve` does.
    """

    def resolved(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: resolved(f"{key}.{name}", inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [resolved(f"{key}.{place}", inner) for place, inner in enumerate(value)]
        return resolve(key, value, environment) if isinstance(value, str) else value

    return {name: resolved(f"{section}.{name}", value) for name, value in options.items()}


def error_text(error: BaseException, options: Mapping[str, Any]) -> str:
    """Return the text of a library's error about resolved options; only its class if they hold a secret, because
    libraries quote values."""

    def holds_secret(key: str, value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(holds_secret(f"{key}.{name}", inner) for name, inner in value.items())
        if isinstance(value, list):
            return any(holds_secret(key, inner) for inner in value)
        return is_secret(key) and bool(value)

    if holds_secret("", options):
        return f"{type(error).__name__}, whose text may hold a secret; leave the secrets out to see it"
    return str(error)


def keep_from_programs(variables: Iterable[str]) -> None:
    """Add variables that `program_environment` leaves out: those that hold secrets of this process's configuration."""
    _variables.update(variables)


def program_environment(used: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a foreign program, such as a user's verifier: it lacks the secrets of this process,
    except those that the references in `used` name."""
    given = {parts[1] for value in used if (parts := reference(value)) is not None}
    return {name: value for name, value in environment.items() if name in given or name not in _variables}
