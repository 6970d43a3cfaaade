"""Keeps secrets out of configurations, logs and records: a setting holds a reference, resolved where it is used.

`env:NAME` is an environment variable, `file:PATH` a file. Only the parameters of a client or a request hold the secret
itself.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rollstream.topics.errors import ConfigurationError

_SECRET = re.compile(r"(password|passphrase|secret|key\.pem|api_key|signing_key|^ui\.token)$")
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
            raise ConfigurationError(f"{key} is {value}, and there is no such variable; export {name}")
        return environment[name]
    try:
        return Path(name).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{key} is {value}, which cannot be read: {error}") from error
