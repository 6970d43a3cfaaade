"""Imports users' own code named in settings and arguments: `package.module:Name` or `path/to/file.py:Name`.

Some settings also take the name of an entry point of an installed package.
"""

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rollstream.topics.errors import ConfigurationError, RollstreamError


def load_object(name: str, named_by: str, kind: str) -> Any:
    """Return the attribute that `name` stands for.

    `named_by` begins error messages ("grouper.makers names"); `kind` describes the expected form ("a maker is named
    package.module:Class"). A file path is relative to the working directory, and the file is executed once per
    process. It can import modules from its folder; installed modules take precedence.

    Raises ConfigurationError if the name has another form, or if the module, file or attribute cannot be imported,
    whatever error the user's code raises.
    """
    source, _, attribute = name.rpartition(":")
    is_file = source.endswith(".py")
    is_module = not is_file and not source.startswith(".") and "/" not in source
    if not source or not attribute.isidentifier() or not (is_file or is_module):
        raise ConfigurationError(f"{named_by} {name!r}; {kind} or path/to/file.py:Name")
    try:
        module = _load_file(Path(source)) if is_file else importlib.import_module(source)
    except (ModuleNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"{named_by} {name!r}, which cannot be imported: {error}; install its package where rollstream is "
            "installed, or name the file: path/to/file.py:Name"
        ) from error
    except RollstreamError:
        raise
    except Exception as error:  # users' code may raise any error
        raise ConfigurationError(f"{named_by} {name!r}, which cannot be imported: {_raised(error)}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"{named_by} {name!r}, but {source} has no attribute {attribute!r}{hint}")
    return getattr(module, attribute)


def load_file(path: Path, named_by: str) -> ModuleType:
    """Return the module of a user's file, which is executed and imports other modules as `load_object` says.

    `named_by` begins error messages ("--fix mend.py"). Raises ConfigurationError if the file cannot be imported.
    """
    try:
        return _load_file(path)
    except RollstreamError:
        raise
    except Exception as error:  # users' code may raise any error
        raise ConfigurationError(f"{named_by} cannot be imported: {_raised(error)}") from error


def _raised(error: Exception) -> str:
    """Return an error as one line, with the line of code that raised it."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SyntaxError):
        return text  # its text names the line
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno})"


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
        # Added last, so that a user's `json.py` does not shadow an installed module.
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    # Registered before it is executed, as the import system does: dataclasses and pickle find their module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def is_plug_in(name: str, group: str) -> bool:
    """Whether `load_plug_in` accepts a name: one with a colon, or an entry point of `group`. Imports nothing."""
    return ":" in name or _entry_point(name, group) is not None


def load_plug_in(name: str, group: str, named_by: str, kind: str) -> Any:
    """Return the object that a name stands for: as `load_object` does, or the entry point of that name in `group`.

    Raises ConfigurationError if there is none, or if it cannot be imported.
    """
    point = None if ":" in name else _entry_point(name, group)
    if point is None:
        return load_object(name, named_by, kind)
    try:
        return point.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigurationError(
            f"{named_by} {name!r}, an entry point that cannot be imported: {error}; install its package again"
        ) from error


def source_digest(value: Any) -> str:
    """Return a digest of the source of an imported object: its module's file or, in a package, its modules.

    It has sixteen hexadecimal digits, and is the same for the same files on any machine; "" if there is no source file.
    """
    module = sys.modules.get(getattr(value, "__module__", None) or type(value).__module__)
    path = Path(getattr(module, "__file__", None) or "")
    if module is None or path.suffix != ".py":
        return ""
    files = sorted(path.parent.rglob("*.py")) if getattr(module, "__package__", "") else [path]
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path.parent).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _entry_point(name: str, group: str) -> EntryPoint | None:
    return next(iter(entry_points(group=group, name=name)), None)
