"""Writes TOML, which the standard library only reads: what is rendered here, `tomllib` reads back equal.

For the configurations that a supervisor hands to its processes and a report keeps for people.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def render(table: Mapping[str, Any]) -> str:
    """TOML of nested tables of strings, numbers, booleans and lists of these; plain keys before tables."""
    return "\n".join(_lines(table, ())).strip() + "\n"


def line_of(text: str, key: str) -> int | None:
    """Number of the line on which a dotted key of a TOML document is set; None where it is not."""
    lines, begin = text.splitlines(), 1
    for number in range(1, len(lines) + 1):
        try:
            table = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue  # within a value of several lines
        if key in _dotted(table):
            return begin
        begin = number + 1
    return None


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's; only DEL must be escaped in TOML and is not in JSON.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _string(value) if isinstance(value, str) else repr(value)
