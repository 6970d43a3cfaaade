"""Imports users' own code named in settings and arguments: `package.module:Name` or `path/to/file.py:Name`."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rollstream.topics.errors import ConfigurationError


def load_object(name: str, named_by: str, kind: str) -> Any:
    """Return the attribute that `name` stands for.

    `named_by` begins error messages ("grouper.makers names"); `kind` describes the expected form ("a maker is named
    package.module:Class"). A file path is relative to the working directory, and the file is executed once in a
    process. It can import modules beside it; installed modules take precedence.

    Raises ConfigurationError if the name has another form, or if the module, file or attribute cannot be imported.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise ConfigurationError(f"{named_by} {name!r}; {kind} or path/to/file.py:Name")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        return getattr(module, attribute)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise ConfigurationError(
            f"{named_by} {name!r}, which cannot be imported: {error}; install its package beside rollstream, or name "
            "the file: path/to/file.py:Name"
        ) from error


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    # Files with the same name in two folders are two modules.
    name = f"rollstream_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        # Last, so that a user's `json.py` does not shadow an installed module.
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    # Before it is executed, as the import system does: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
