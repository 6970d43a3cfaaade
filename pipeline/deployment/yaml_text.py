"""Writes plain values as YAML for people to read: in block style, with quotes wherever YAML could misread a text.

It supports only what our deployments need: tables, lists, texts, numbers, booleans and null. Keys are written
unchanged. In templates of YAML, Raw is a scalar that the template engine fills in, and Enclosed is an entry that the
engine may leave out.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PLAIN = re.compile(r"(--?)?[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""Texts that YAML 1.1 does not read as texts."""
_WIDTH = 90
"""Most characters of a list that is written in one line."""
MERGE = "<<"
"""Key whose value is the name of an anchor."""


class Raw(str):
    """A scalar that is written unchanged, without quotes."""

    __slots__ = ()


@dataclass(frozen=True)
class Enclosed:
    """A value of a table, or items of a list, between two lines that are not YAML."""

    before: str
    value: Any
    """The value of its key or, within a list, the list of the enclosed items."""
    after: str


def render_yaml(table: Mapping[str, Any], anchors: Mapping[str, str] | None = None) -> str:
    """Render a table. `anchors` names top-level keys whose values may be merged into others by `MERGE`."""
    lines: list[str] = []
    for key, value in table.items():
        anchor = f" &{name}" if (name := (anchors or {}).get(key)) else ""
        first, *rest = _entry(key, value)
        lines += [f"{first}{anchor}" if anchor else first, *rest]
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Enclosed):
        yield value.before
        yield from _entry(key, value.value)
        yield value.after
    elif key == MERGE:
        yield f"{key}: *{value}"
    elif isinstance(value, Mapping) and value:
        yield f"{key}:"
        yield from (f"  {line}" for name, item in value.items() for line in _entry(name, item))
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        yield from _list(key, value)
    else:
        yield f"{key}:" if value is None else f"{key}: {_scalar(value)}"


def _list(key: str, values: Sequence[Any]) -> Iterator[str]:
    if not any(isinstance(value, Mapping | Enclosed) for value in values):
        items = [_scalar(item) for item in values]
        if sum(map(len, items)) < _WIDTH:
            yield f"{key}: [{', '.join(items)}]"
            return
    yield f"{key}:"
    yield from (f"  {line}" for line in _items(values))


def _items(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, Enclosed):
            yield value.before
            yield from _items(value.value)
            yield value.after
        elif isinstance(value, Mapping) and value:
            lines = (line for name, item in value.items() for line in _entry(name, item))
            yield f"- {next(lines)}"
            yield from (f"  {line}" for line in lines)
        else:
            yield f"- {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        if is_plain:
            return value
        if ('"' in value or "\\" in value) and value.isprintable():
            return "'{}'".format(value.replace("'", "''"))  # Texts such as JSON are easier to read this way.
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, Mapping | Sequence) and value:
        raise TypeError(f"a list holds {value!r}; lists may hold only texts, numbers and tables")
    return json.dumps(value)


def _escaped(character: str) -> str:
    """Return a character as it is written between double quotes."""
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08X}"
