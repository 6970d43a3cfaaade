"""Typed settings from layers: a tree of frozen dataclasses, filled from a file, then the environment, then flags.

This module knows no setting by name. An error in a layer is a ConfigurationError that names the file, variable or flag,
the key, and the valid values.
"""

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.secrets import is_secret

ENVIRONMENT_PREFIX = "ROLLSTREAM_"
"""A setting's variable is this prefix and the setting's key in upper case, with `__` for each dot."""
_NOT_SETTINGS = re.compile(
    ENVIRONMENT_PREFIX
    + r"(READY_FD|LIFELINE_FD|LISTEN_FD|REGISTRY|MAVEN_REPOSITORY|KAFKA_IMAGE"
    + r"|PIPELINERL|QUIXSTREAMS|REVERB|RLINF|TRANSFERQUEUE|EPISODE_[0-9A-Fa-f]*|TEST_\w+)"
)
"""Variables with our prefix that are not settings: a supervisor's, mirrors', keys of episodes, and those of tests."""
BOOTSTRAP_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"

Keys = tuple[str, ...]
C = TypeVar("C")


class Layer(NamedTuple):
    """Settings from one origin, e.g. a file; values of variables and flags are parsed to the type of their field."""

    origin: str
    path: Keys
    value: Any
    textual: bool
    document: str = ""
    """Text of the file; empty for other origins."""

    @property
    def is_variable(self) -> bool:
        """Whether the origin is an environment variable."""
        return self.textual and self.origin.startswith(ENVIRONMENT_PREFIX)

    def place(self, key: str) -> str:
        """Name the place where a dotted key is set: a flag, a variable, or a file and its line."""
        line = _line_of(self.document, key)
        return self.origin if line is None else f"{self.origin}:{line}"


Guard = Callable[[Layer, str, Any], Any]
"""Function from a layer, a dotted key and its value to the value to use."""


def fill(
    cls: type[C], layers: Sequence[Layer], guard: Guard = lambda _layer, _key, value: value
) -> tuple[C, Mapping[Keys, Layer]]:
    """Return a `cls` with the settings of all layers, in which later layers win, and the layer of each key."""
    tree: dict[str, Any] = {}
    origins: dict[Keys, Layer] = {}
    for layer in layers:
        _place(cls, tree, origins, layer, guard)
    try:
        return cast(C, _build(cls, tree, ())), origins
    except ConfigurationError as error:
        raise ConfigurationError(f"{_place_of_fault(cls, tree, origins, str(error))}: {error}") from error


def _place_of_fault(cls: type, tree: dict[str, Any], origins: Mapping[Keys, Layer], fault: str) -> str:
    """Name the place of the setting that causes a fault; of several settings, the last one set."""
    changing = []
    for path in reversed(list(origins)):
        try:
            _build(cls, _without(tree, path), ())
        except ConfigurationError as error:
            if str(error) != fault:
                changing.append(path)
        else:
            changing = [path]
            break
    return origins[changing[0]].place(".".join(changing[0])) if changing else "defaults"


def _without(tree: dict[str, Any], path: Keys) -> dict[str, Any]:
    first, *rest = path
    # A value of a later layer may have replaced the table that held the key.
    if not rest or not isinstance(tree[first], dict):
        return {key: value for key, value in tree.items() if key != first}
    return {**tree, first: _without(tree[first], tuple(rest))}


def known_keys(cls: type) -> tuple[str, ...]:
    """Return every key of a tree, dotted, e.g. `kafka.bootstrap_servers`; a table with arbitrary keys ends in `.*`."""
    return tuple(_keys(cls, ()))


def plain(value: Any) -> Any:
    """Convert dataclasses to nested dicts and paths to strings, without None values: ready to be written as TOML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return {name: plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def file_layers(path: Path | None) -> Iterator[Layer]:
    """Yield the layer of a TOML file, if one is given."""
    if path is None:
        return
    try:
        document = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(document)
    except OSError as error:
        raise ConfigurationError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigurationError(f"configuration file {path} is not TOML: {error}") from error
    yield Layer(str(path), (), content, False, document)


def environment_layers(cls: type, environment: Mapping[str, str]) -> Iterator[Layer]:
    """Yield the layers of KAFKA_BOOTSTRAP_SERVERS and of the variables that set settings of `cls`."""
    if environment.get(BOOTSTRAP_VARIABLE, "").strip():
        yield Layer(BOOTSTRAP_VARIABLE, ("kafka", "bootstrap_servers"), environment[BOOTSTRAP_VARIABLE].strip(), True)
    named = {name: path for name in environment if (path := _setting_of_variable(cls, name))}
    # Entries in the order of their numbers, because a new entry has the next one.
    numbers = {name: [int(part) if part.isdecimal() else -1 for part in path] for name, path in named.items()}
    for name in sorted(named, key=lambda name: (numbers[name], name)):
        yield Layer(name, named[name], environment[name], True)


def is_setting_variable(cls: type, name: str) -> bool:
    """Whether a variable of this name sets a setting of `cls`, or has the form of one that does."""
    return name == BOOTSTRAP_VARIABLE or bool(_setting_of_variable(cls, name))


def _setting_of_variable(cls: type, name: str) -> Keys:
    """Return the path of the key that a variable names, known or not; empty if it does not name a setting."""
    path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
    if not name.startswith(ENVIRONMENT_PREFIX) or _NOT_SETTINGS.fullmatch(name):
        return ()
    return path if len(path) > 1 or path[0] in _hints(cls) else ()


def variable_of(key: str) -> str:
    """Return the variable of a setting, given its dotted key; in Kafka's own keys, `_` stands for a dot."""
    key = re.sub(rf"^({'|'.join(_KAFKA_KEYS)})\.(.+)", lambda kafka: f"{kafka[1]}.{kafka[2].replace('.', '_')}", key)
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")


def check_variables(cls: type, environment: Mapping[str, str], known: Collection[str] = ()) -> None:
    """Raise ConfigurationError for a variable that has our prefix and is neither a setting of `cls` nor known."""
    services = _linked_services(environment)
    for name in sorted(environment):
        others = (name in known, is_setting_variable(cls, name), _NOT_SETTINGS.fullmatch(name))
        if not name.startswith(ENVIRONMENT_PREFIX) or any(others) or name.startswith(services):
            continue
        settings = [variable_of(key.removesuffix(".*")).removeprefix(ENVIRONMENT_PREFIX) for key in known_keys(cls)]
        near = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), settings, 1, 0.7)
        hint = f"did you mean {ENVIRONMENT_PREFIX}{near[0]}?" if near else f"use {ENVIRONMENT_PREFIX}SECTION__NAME."
        raise ConfigurationError(f"{name} does not set a setting; {hint} Unset it if it is not for rollstream")


def _linked_services(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return prefixes of the variables that Kubernetes sets in a pod for services, e.g. one named rollstream-infer."""
    suffix = "_SERVICE_HOST"
    services = [name.removesuffix(suffix) for name in environment if name.endswith(suffix)]
    return tuple(f"{service}_{kind}" for service in services for kind in ("SERVICE_HOST", "SERVICE_PORT", "PORT"))


def flag_layers(
    flags: Sequence[str], client_flags: Sequence[str], options: Sequence[tuple[str, str]] = ()
) -> Iterator[Layer]:
    """Yield the layers of --set flags `section.key=value`, of -X flags `key=value`, and of options with their flag."""
    for option, setting in options:
        key, _, value = setting.partition("=")
        yield Layer(option, tuple(key.split(".")), value, True)
    for flag in flags:
        key, separator, value = flag.partition("=")
        if not separator or not key.strip():
            raise ConfigurationError(f"--set {flag}: give key=value, e.g. --set grouping.batch_rollouts=64")
        yield Layer(f"--set {key.strip()}", tuple(key.strip().split(".")), value, True)
    for flag in client_flags:
        key, separator, value = flag.partition("=")
        if not separator or not key.strip():
            raise ConfigurationError(f"-X {flag}: give key=value, e.g. -X security.protocol=SASL_SSL")
        yield Layer(f"-X {key.strip()}", ("kafka", "client", key.strip()), value, True)


def _place(root: type, tree: dict[str, Any], origins: dict[Keys, Layer], layer: Layer, guard: Guard) -> None:
    """Check a layer's keys against the tree of dataclasses and merge its values, each parsed to its field's type."""

    def set_by_layer(path: Keys) -> None:
        origins.pop(path, None)  # also moves the key to the end of the order
        origins[path] = layer

    def walk(cls: type, parent: Keys, values: Mapping[str, Any], into: dict[str, Any]) -> None:
        for name, value in values.items():
            path = (*parent, name)
            hint = _hints(cls).get(name)
            if hint is None:
                raise ConfigurationError(_unknown(root, layer.place(".".join(path)), path))
            if entry := entry_type(hint):
                walk_entries(entry, path, _parsed(layer, path, value, hint), into.setdefault(name, {}))
            elif dataclasses.is_dataclass(hint):
                if not isinstance(value, dict):
                    raise ConfigurationError(
                        f"{layer.place('.'.join(path))}: {'.'.join(path)} is a table of settings, not a value; "
                        f"set one of {', '.join(_hints(cast(type, hint)))} in it"
                    )
                walk(cast(type, hint), path, value, into.setdefault(name, {}))
            elif _is_free_table(hint) and isinstance(parsed := _parsed(layer, path, value, hint), dict):
                walk_free(path, parsed, into.setdefault(name, {}))
            elif _is_table(hint) and isinstance(parsed := _parsed(layer, path, value, hint), dict):
                dotted = ".".join(path)
                flat = {key: guard(layer, f"{dotted}.{key}", item) for key, item in flattened(parsed)}
                into.setdefault(name, {}).update(_leaf(layer, path, flat, hint))
                for key in flat:
                    set_by_layer((*path, key))
            else:
                guarded = guard(layer, ".".join(path), value)
                into[name] = _leaf(layer, path, _parsed(layer, path, guarded, hint), hint)
                set_by_layer(path)

    def walk_entries(cls: type, path: Keys, value: Any, into: dict[str, Any]) -> None:
        """Replace all entries by those of a list, or change the entries that a mapping names by number or name."""
        dotted = ".".join(path)
        if isinstance(value, list):
            into.clear()
            for key in [key for key in origins if key[: len(path)] == path]:
                del origins[key]
            tables = {str(number): table for number, table in enumerate(value)}
        elif isinstance(value, dict):
            tables = {_entry_number(cls, layer, dotted, label, into): table for label, table in value.items()}
        else:
            tables = {"": value}
        for number, table in tables.items():
            if isinstance(table, str) and layer.textual:
                table = _parsed(layer, (*path, number), table, dict[str, Any])
            if not isinstance(table, dict):
                raise ConfigurationError(
                    f"{layer.place(dotted)}: {dotted} is a list of tables, not of values; begin each with [[{dotted}]]"
                )
            set_by_layer((*path, number))
            walk(cls, (*path, number), table, into.setdefault(number, {}))

    def walk_free(path: Keys, values: Mapping[str, Any], into: dict[str, Any]) -> None:
        for name, value in values.items():
            here = (*path, name)
            if isinstance(value, dict):
                earlier = into.get(name)
                into[name] = earlier if isinstance(earlier, dict) else {}
                walk_free(here, value, into[name])
            else:
                guarded = _guarded(guard, layer, ".".join(here), value)
                into[name] = _free_value(guarded) if layer.textual and isinstance(guarded, str) else guarded
                set_by_layer(here)

    nested: Any = layer.value
    for part in reversed(layer.path):
        nested = {part: nested}
    if layer.path:
        nested = _rejoin_table_keys(root, nested, layer.is_variable)
    walk(root, (), nested, tree)


def _guarded(guard: Guard, layer: Layer, key: str, value: Any) -> Any:
    """Apply the guard to a value of a free table, item by item in lists and the tables that they hold."""
    if isinstance(value, list):
        return [_guarded(guard, layer, f"{key}.{place}", item) for place, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _guarded(guard, layer, f"{key}.{name}", item) for name, item in value.items()}
    return guard(layer, key, value)


_KAFKA_KEYS = ("kafka.client", "broker.properties")
"""Tables of keys that belong to Kafka, none of which contains `_`."""


def _rejoin_table_keys(root: type, nested: dict[str, Any], from_environment: bool) -> dict[str, Any]:
    """Join the keys below a table of strings, e.g. `kafka.client`, into one dotted key.

    The names of variables cannot contain dots, so in variables `_` is a dot in the tables of Kafka's own keys.
    """
    path = []
    value: Any = nested
    while isinstance(value, dict):
        [(part, value)] = value.items()
        path.append(part)
    hint: Any = root
    for depth, part in enumerate(path):
        if entry := entry_type(hint):
            hint = entry  # this part is the entry's number or name
            continue
        hint = _hints(cast(type, hint)).get(part) if dataclasses.is_dataclass(hint) else None
        if hint is not None and _is_table(hint) and not _is_free_table(hint) and depth + 1 < len(path):
            key = ".".join(path[depth + 1 :])
            dotted = from_environment and ".".join(path[: depth + 1]) in _KAFKA_KEYS
            path[depth + 1 :] = [key.replace("_", ".") if dotted else key]
            break
    for part in reversed(path):
        value = {part: value}
    return cast(dict[str, Any], value)


# msgspec is imported only where a value is converted: importing it takes a fifth of the configuration's import time.


def _parsed(layer: Layer, path: Keys, value: Any, hint: Any) -> Any:
    """Parse the text of a variable or flag to its field's type: lists and tables are written as in TOML."""
    import msgspec

    if not (layer.textual and isinstance(value, str)) or hint in (str, Path):
        return value
    if typing.get_origin(hint) in (list, tuple) or _is_table(hint) or "Sequence" in str(hint):
        try:
            return tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(
                f"{layer.origin}: {'.'.join(path)} expects {_describe(hint)} as in TOML"
                f"{_got('.'.join(path), value, hint)}"
            ) from error
    try:
        # Numbers and booleans; a field that may also be a string keeps the text.
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        return value


def _free_value(text: str) -> Any:
    """Parse a value as TOML; return text that is not TOML unchanged."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _entry_number(cls: type, layer: Layer, dotted: str, label: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the number of the entry that `label`, a part of a key, names: by number, or by a field in NAMED_BY.

    In a variable, names match in lower case, with `_` for `-` and `.`.
    """

    def written(text: str) -> str:
        return re.sub(r"\W", "_", text.lower()) if layer.is_variable else text

    if label.isdecimal() and int(label) <= len(entries):
        return str(int(label))
    names: dict[str, str] = {}
    for number, table in entries.items():
        named_by = next((str(table[key]) for key in getattr(cls, "NAMED_BY", ()) if table.get(key)), number)
        names.setdefault(written(named_by), number)
    if label in names:
        return names[label]
    near = difflib.get_close_matches(label, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"the next new entry is {dotted}.{len(entries)}"
    known = ", ".join(names) if names else "none"
    raise ConfigurationError(
        f"{layer.place(f'{dotted}.{label}')}: {dotted} has no entry {label!r} (there are: {known}); {hint}"
    )


def _leaf(layer: Layer, path: Keys, value: Any, hint: Any) -> Any:
    import msgspec

    try:
        return msgspec.convert(value, hint, dec_hook=_path_hook)
    except msgspec.ValidationError as error:
        key = ".".join(path)
        raise ConfigurationError(
            f"{layer.place(key)}: {key} expects {_describe(hint)}{_got(key, value, hint)}"
        ) from error


def _got(key: str, value: Any, hint: Any) -> str:
    """Return the end of an error message, which shows the value unless it is a secret, or tables that may hold one."""
    hidden = is_secret(key) or _is_table(hint) or entry_type(hint) or isinstance(value, Mapping)
    return "; its text is not shown, as it may hold a secret" if hidden else f", got {value!r}"


def _path_hook(hint: type, value: Any) -> Any:
    if hint is Path and isinstance(value, str):
        return Path(value)
    import msgspec

    raise msgspec.ValidationError(f"{value!r} is not a {hint.__name__}")


def _line_of(document: str, key: str) -> int | None:
    """Return the number of the line that sets a dotted key of a TOML document, or None."""
    lines, begin = document.splitlines(), 1
    for number in range(1, len(lines) + 1):
        try:
            table = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue  # inside a multi-line value
        if key in _dotted(table):
            return begin
        begin = number + 1
    return None


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of each table, array of tables and value."""
    for key, value in table.items():
        yield prefix + key
        entries = value if isinstance(value, list) else ()
        tables = {str(number): entry for number, entry in enumerate(entries) if isinstance(entry, Mapping)}
        yield from _dotted(value if isinstance(value, Mapping) else tables, f"{prefix}{key}.")


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys of a table, written `"a.b" = 1` or `a.b = 1`, with values as librdkafka and TOML spell them.

    The tables of a list have their numbers as keys, as in `environments.0.use`.
    """
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            value = {str(number): entry for number, entry in enumerate(value)}
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _build(cls: type, values: Mapping[str, Any], at: Keys) -> Any:
    arguments: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        if entry := entry_type(hint):
            numbered = sorted(values.get(name, {}).items(), key=lambda item: int(item[0]))
            arguments[name] = tuple(_build(entry, table, (*at, name, number)) for number, table in numbered)
        elif dataclasses.is_dataclass(hint):
            arguments[name] = _build(cast(type, hint), values.get(name, {}), (*at, name))
        elif name in values:
            arguments[name] = values[name]
    try:
        return cls(**arguments)
    except (ConfigurationError, ValueError) as error:
        section = f"[{'.'.join(at)}] " if at else ""
        raise ConfigurationError(f"{section}{error}") from error


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _is_table(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_free_table(hint: Any) -> bool:
    """Whether a table's values may be of any type; values of other tables are strings."""
    return _is_table(hint) and typing.get_args(hint)[1] is Any


def entry_type(hint: Any) -> type | None:
    """Return the dataclass of the entries if the hint is an array of tables, else None."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and len(arguments) == 2 and dataclasses.is_dataclass(arguments[0]):
        return cast(type, arguments[0])
    return None


def _keys(cls: type, at: Keys) -> Iterator[str]:
    for name, hint in _hints(cls).items():
        if entry := entry_type(hint):
            yield from _keys(entry, (*at, name, "0"))
        elif dataclasses.is_dataclass(hint):
            yield from _keys(cast(type, hint), (*at, name))
        else:
            yield ".".join((*at, name)) + (".*" if _is_table(hint) else "")


def _unknown(root: type, origin: str, path: Keys) -> str:
    """Return the error for an unknown key, with the most similar known key, if possible one of the same table."""
    key = ".".join(path)
    # In `known_keys`, keys of list entries have the number 0.
    number = next((part for part in path if part.isdecimal()), "0")
    like = tuple("0" if part.isdecimal() else part for part in path)
    path, parent = like, ".".join(like[:-1])
    keys = known_keys(root)
    sections = {".".join(k.split(".")[:n]) for k in keys for n in range(1, k.count(".") + 1)}
    siblings = [k for k in (*keys, *sections) if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(".".join(path), siblings, 1, 0.75) or difflib.get_close_matches(
        ".".join(path), (*keys, *sections), 1, 0.6
    )
    if not near:
        near = [k for k in keys if k.rpartition(".")[2] == path[-1]][:1]
    hint = (
        f"did you mean {near[0].removesuffix('.*').replace('.0.', f'.{number}.')}?"
        if near
        else f"sections and keys: {', '.join(_hints(root))}"
    )
    return f"{origin}: unknown key {key}; {hint}"


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    if hint in names:
        return names[hint]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in typing.get_args(hint) if a is not type(None))
    if _is_table(hint):
        return "a table" if _is_free_table(hint) else "a table of strings"
    if origin is not None and typing.get_args(hint):
        return f"a list, each item {_describe(typing.get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint))
