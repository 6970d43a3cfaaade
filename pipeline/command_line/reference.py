"""The lists behind --help-settings and --help-metrics: every setting and every served metric, each with its meaning."""

import ast
import dataclasses
import difflib
import inspect
import shutil
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.settings import entry_type
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS, SERVING_ROLES, MetricSpec, of_role


class SettingHelp(NamedTuple):
    """One setting: its dotted key, its default as in TOML, and its meaning."""

    key: str
    default: str
    meaning: str


class Section(NamedTuple):
    """A table of the configuration: its header as in a file, empty for the run's own keys, its purpose and settings."""

    title: str
    about: str
    settings: tuple[SettingHelp, ...]


def sections(cls: type = RunConfig, path: tuple[str, ...] = ()) -> Iterator[Section]:
    """Yield each table of the configuration with what the docstrings of its dataclass say."""
    hints, meanings = typing.get_type_hints(cls), _attribute_docstrings(cls)
    plain, nested = [], []
    for field in dataclasses.fields(cls):
        here, hint = (*path, field.name), hints[field.name]
        if entry := entry_type(hint):
            plain.append(SettingHelp(".".join(here), "[]", meanings[field.name]))
            nested.append((entry, (*here, "0")))
        elif dataclasses.is_dataclass(hint):
            nested.append((typing.cast(type, hint), here))
        # A field that may hold a dataclass and is None by default cannot be set in a file.
        elif field.init and not (field.default is None and any(map(dataclasses.is_dataclass, typing.get_args(hint)))):
            plain.append(SettingHelp(".".join(here), _default(field), meanings[field.name]))
    title = f"[{'.'.join(path)}]" if path else ""
    if path and path[-1].isdecimal():
        title = f"[[{'.'.join(path[:-1])}]]"
    yield Section(title, " ".join(inspect.cleandoc(cls.__doc__ or "").split()), tuple(plain))
    for kind, here in nested:
        yield from sections(kind, here)


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, by the field's name."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = getattr(following, "value", None)
            if isinstance(following, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                meanings[statement.target.id] = " ".join(value.value.split())
    return meanings


def _default(field: "dataclasses.Field[Any]") -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return _toml(value)


def _toml(value: Any) -> str:
    if value is None:  # TOML has no None
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{}"
    return f'"{value}"' if isinstance(value, str | Path) else repr(value)


def metrics() -> Iterator[tuple[str, list[MetricSpec]]]:
    """Yield the role and its metrics for each role that serves any; first, with an empty role, those of several."""
    yield "", [spec for spec in CATALOGUE_OF_METRICS if len(spec.roles) > 1]
    for role in SERVING_ROLES:
        if specs := [spec for spec in of_role(role) if len(spec.roles) == 1]:
            yield role, specs


def metric_meaning(spec: MetricSpec) -> str:
    """Return what a metric means, which roles serve it if they are several but not all, and when."""
    roles = f" Served by {', '.join(spec.roles)}." if 1 < len(spec.roles) < len(SERVING_ROLES) else ""
    return f"{spec.help}{roles}{f' Served when {spec.when}.' if spec.when else ''}"


def settings_text(below: str = "") -> str:
    """Return the settings below a key, or all, with their defaults and meanings. Raises ConfigurationError."""
    parts = []
    for section in sections():
        settings = [s for s in section.settings if not below or f"{s.key}.".startswith(f"{below}.")]
        if settings:
            entries = (f"  {s.key} = {s.default}\n{_wrapped(s.meaning, ' ' * 6)}" for s in settings)
            parts.append("\n".join((f"{section.title}\n{_wrapped(section.about)}\n".lstrip(), *entries)))
    if not parts:
        keys = [s.key for section in sections() for s in section.settings]
        raise _unknown("setting", below, {*keys, *(key.rpartition(".")[0] for key in keys)} - {""})
    return "\n\n".join(parts)


def metrics_text(role: str = "") -> str:
    """Return the metrics that a role serves, or all, with their meanings. Raises ConfigurationError."""
    specs = of_role(role) if role else CATALOGUE_OF_METRICS
    if not specs:
        raise _unknown("role that serves metrics", role, SERVING_ROLES)
    parts = []
    for spec in specs:
        labels = f"{{{', '.join(spec.labels)}}}" if spec.labels else ""
        unit = f" in {spec.unit}" if spec.unit else ""
        parts.append(f"{spec.name}{labels}  {spec.kind}{unit}\n{_wrapped(metric_meaning(spec), ' ' * 4)}")
    return "\n".join(parts)


def _unknown(kind: str, name: str, known: Collection[str]) -> ConfigurationError:
    near = difflib.get_close_matches(name, known, 1)
    first = dict.fromkeys(key.partition(".")[0] for key in sorted(known))
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(first)}"
    return ConfigurationError(f"there is no {kind} {name!r}; {hint}")


def _wrapped(text: str, indent: str = "") -> str:
    width = min(shutil.get_terminal_size().columns, 120)
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
