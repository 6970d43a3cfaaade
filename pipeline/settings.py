"""Typed settings from layers: a tree of frozen dataclasses, filled from a file, then the environment, then flags.

Knows no setting by name. Whatever is wrong with a layer is a ConfigurationError that says in
which file, variable or flag, at which key, and what would be right.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pipeline.toml import line_of
from topics.errors import ConfigurationError

ENVIRONMENT_PREFIX = "ROLLSTREAM__"
BOOTSTRAP_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"

Keys = tuple[str, ...]
C = TypeVar("C")


class Layer(NamedTuple):
    """Settings of one origin, e.g. a file; strings of the environment and of flags are parsed by the field's type."""

    origin: str
    path: Keys
    value: Any
    textual: bool
    document: str = ""
    """Text of the file, where it is one."""

    def place(self, key: str) -> str:
        """Where a dotted key is set: a flag, a variable, or a file and its line."""
        line = line_of(self.document, key)
        return self.origin if line is None else f"{self.origin}:{line}"


Guard = Callable[[Layer, str, Any], Any]
"""Given a layer, a dotted key and the value there: the value to take."""


def fill(
    cls: type[C], layers: Sequence[Layer], guard: Guard = lambda _layer, _key, value: value
) -> tuple[C, Mapping[Keys, Layer]]:
    """A `cls` with the settings of all layers, later ones winning, and the layer each that was set came from."""
    tree: dict[str, Any] = {}
    origins: dict[Keys, Layer] = {}
    for layer in layers:
        _place(cls, tree, origins, layer, guard)
    try:
        return cast(C, _build(cls, tree, ())), origins
    except ConfigurationError as error:
        raise ConfigurationError(f"{_place_of_fault(cls, tree, origins, str(error))}: {error}") from error


def _place_of_fault(cls: type, tree: dict[str, Any], origins: Mapping[Keys, Layer], fault: str) -> str:
    """Where the setting is without which there would be no such fault; of several the one that came last."""
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
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    return {**tree, first: _without(tree[first], tuple(rest))}


def known_keys(cls: type) -> tuple[str, ...]:
    """Every key of a tree, dotted, e.g. `kafka.bootstrap_servers`; tables of free keys end in `.*`."""
    return tuple(_keys(cls, ()))


def plain(value: Any) -> Any:
    """Dataclasses as nested dicts, paths as strings, without what is None: ready to be written as TOML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return {name: plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def file_layers(path: Path | None) -> Iterator[Layer]:
    """The whole of a TOML file, where one is given."""
    if path is None:
        return
    try:
        document = path.read_text(encoding="utf-8")
        content = tomllib.loads(document)
    except OSError as error:
        raise ConfigurationError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigurationError(f"configuration file {path} is not TOML: {error}") from error
    yield Layer(str(path), (), content, False, document)


def environment_layers(environment: Mapping[str, str]) -> Iterator[Layer]:
    """ROLLSTREAM__SECTION__KEY variables, and the one every Kafka tool knows."""
    if environment.get(BOOTSTRAP_VARIABLE, "").strip():
        yield Layer(BOOTSTRAP_VARIABLE, ("kafka", "bootstrap_servers"), environment[BOOTSTRAP_VARIABLE].strip(), True)
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            yield Layer(name, path, environment[name], True)


def flag_layers(
    flags: Sequence[str], client_flags: Sequence[str], options: Sequence[tuple[str, str]] = ()
) -> Iterator[Layer]:
    """`section.key=value` of our flags, `key=value` of librdkafka's; options come with the flag they were given as."""
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
        origins.pop(path, None)  # the last one that was set is the last one here
        origins[path] = layer

    def walk(cls: type, at: Keys, values: Mapping[str, Any], into: dict[str, Any]) -> None:
        for name, value in values.items():
            here = (*at, name)
            hint = _hints(cls).get(name)
            if hint is None:
                raise ConfigurationError(_unknown(root, layer.place(".".join(here)), here))
            if dataclasses.is_dataclass(hint):
                if not isinstance(value, dict):
                    raise ConfigurationError(
                        f"{layer.place('.'.join(here))}: {'.'.join(here)} is a table of settings, not {value!r}; "
                        f"set one of {', '.join(_hints(cast(type, hint)))} in it"
                    )
                walk(cast(type, hint), here, value, into.setdefault(name, {}))
            elif _is_table(hint) and isinstance(parsed := _parsed(layer, here, value, hint), dict):
                dotted = ".".join(here)
                flat = {key: guard(layer, f"{dotted}.{key}", item) for key, item in _flatten(parsed)}
                into.setdefault(name, {}).update(_leaf(layer, here, flat, hint))
                for key in flat:
                    set_by_layer((*here, key))
            else:
                guarded = guard(layer, ".".join(here), value)
                into[name] = _leaf(layer, here, _parsed(layer, here, guarded, hint), hint)
                set_by_layer(here)

    nested: Any = layer.value
    for part in reversed(layer.path):
        nested = {part: nested}
    if layer.path:
        nested = _rejoin_table_keys(root, nested, layer.origin.startswith(ENVIRONMENT_PREFIX))
    walk(root, (), nested, tree)


def _rejoin_table_keys(root: type, nested: dict[str, Any], from_environment: bool) -> dict[str, Any]:
    """Below a table of free keys the rest of the path is one dotted key; in variables `_` stands for the dot."""
    path = []
    value: Any = nested
    while isinstance(value, dict):
        [(part, value)] = value.items()
        path.append(part)
    hint: Any = root
    for depth, part in enumerate(path):
        hint = _hints(cast(type, hint)).get(part) if dataclasses.is_dataclass(hint) else None
        if hint is not None and _is_table(hint) and depth + 1 < len(path):
            key = ".".join(path[depth + 1 :])
            path[depth + 1 :] = [key.replace("_", ".") if from_environment else key]
            break
    for part in reversed(path):
        value = {part: value}
    return cast(dict[str, Any], value)


# msgspec is imported where a value is converted: a fifth of what importing the configuration costs.


def _parsed(layer: Layer, here: Keys, value: Any, hint: Any) -> Any:
    """Text of a variable or flag as what its field holds: lists and tables are written as in TOML."""
    import msgspec

    if not (layer.textual and isinstance(value, str)) or hint in (str, Path):
        return value
    if typing.get_origin(hint) in (list, tuple) or _is_table(hint) or "Sequence" in str(hint):
        try:
            return tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(
                f"{layer.origin}: {'.'.join(here)} expects {_describe(hint)} as in TOML, got {value!r}"
            ) from error
    try:
        # Numbers and booleans; a string where one may stand too stays as it is.
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        return value


def _leaf(layer: Layer, here: Keys, value: Any, hint: Any) -> Any:
    import msgspec

    try:
        return msgspec.convert(value, hint, dec_hook=_path_hook)
    except msgspec.ValidationError as error:
        key = ".".join(here)
        raise ConfigurationError(f"{layer.place(key)}: {key} expects {_describe(hint)}, got {value!r}") from error


def _path_hook(hint: type, value: Any) -> Any:
    if hint is Path and isinstance(value, str):
        return Path(value)
    import msgspec

    raise msgspec.ValidationError(f"{value!r} is no {hint.__name__}")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a table, whether written `"a.b" = 1` or `a.b = 1`; values as librdkafka and Kafka spell them."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _build(cls: type, values: Mapping[str, Any], at: Keys) -> Any:
    arguments = {
        name: _build(cast(type, hint), values.get(name, {}), (*at, name)) if nested else values[name]
        for name, hint in _hints(cls).items()
        for nested in [dataclasses.is_dataclass(hint)]
        if nested or name in values
    }
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


def _keys(cls: type, at: Keys) -> Iterator[str]:
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _keys(cast(type, hint), (*at, name))
        else:
            yield ".".join((*at, name)) + (".*" if _is_table(hint) else "")


def _unknown(root: type, origin: str, path: Keys) -> str:
    """Name the nearest key: spelled most alike, siblings before the same name in another section."""
    key = ".".join(path)
    parent = ".".join(path[:-1])
    keys = known_keys(root)
    sections = {".".join(k.split(".")[:n]) for k in keys for n in range(1, k.count(".") + 1)}
    siblings = [k for k in (*keys, *sections) if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(key, siblings, 1, 0.75) or difflib.get_close_matches(
        key, (*keys, *sections), 1, 0.6
    )
    if not near:
        near = [k for k in keys if k.rpartition(".")[2] == path[-1]][:1]
    hint = f"did you mean {near[0].removesuffix('.*')}?" if near else f"sections and keys: {', '.join(_hints(root))}"
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
        return "a table of strings"
    if origin is not None and typing.get_args(hint):
        return f"a list, each item {_describe(typing.get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint))
