"""Secrets stay out of what is written: a setting names where a secret is, and whoever needs it asks for it there.

`env:NAME` is a variable of the environment, `file:PATH` a file. Configurations, and all that is made of them, hold
these references; only what a client or a request is built from is resolved.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from topics.errors import ConfigurationError

_SECRET = re.compile(r"(password|passphrase|secret|key\.pem|api_key)$")
_REFERENCE = re.compile(r"(?P<kind>env|file):(?P<name>.+)", re.DOTALL)


def is_secret(key: str) -> bool:
    """Whether a setting of this name, ours or librdkafka's, holds a secret."""
    return _SECRET.search(key) is not None


def reference(text: str) -> tuple[str, str] | None:
    """Kind (env or file) and name of a reference; None where it is none."""
    found = _REFERENCE.fullmatch(text)
    return (found["kind"], found["name"]) if found else None


def resolve(key: str, value: str, environment: Mapping[str, str] = os.environ) -> str:
    """What a setting stands for: the secret where its value is a reference, else the value.

    Raises ConfigurationError where the variable is not set or the file cannot be read.
    """
    found = reference(value) if is_secret(key) else None
    if found is None:
        return value
    kind, name = found
    if kind == "env":
        if name not in environment:
            raise ConfigurationError(f"{key} is {value}, and there is no such variable; export {name}")
        return environment[name]
    try:
        return Path(name).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{key} is {value}, which cannot be read: {error}") from error
