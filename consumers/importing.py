"""What users name in settings and arguments, `package.module:attribute`, imported; errors say who named it."""

import importlib
from typing import Any

from topics.errors import ConfigurationError


def imported(name: str, said: str, form: str) -> Any:
    """The attribute that a name stands for. `said` begins errors ("grouper.makers names"), `form` ends that of a name
    which is none ("a maker is named package.module:Class").

    Raises ConfigurationError where it is no such name, or the module cannot be imported or has no such attribute.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute.isidentifier():
        raise ConfigurationError(f"{said} {name!r}; {form}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{said} {name!r}, which cannot be imported: {error}; install it beside rollstream, or put its folder in "
            "PYTHONPATH"
        ) from error
