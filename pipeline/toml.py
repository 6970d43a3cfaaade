"""Writes TOML that `tomllib` reads back unchanged, because the standard library can only read TOML.

Used for the configurations that a supervisor hands to its processes and that are kept for people to read.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, time
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def render(table: Mapping[str, Any]) -> str:
    """Render nested tables and arrays of tables whose values are strings, numbers, booleans, times, or lists of these;
    plain keys come before tables."""
    return "\n".join(_lines(table, ())).strip() + "\n"


def line_of(text: str, key: str) -> int | None:
    """Return the number of the line that sets a dotted key of a TOML document, or None."""
    lines, begin = text.splitlines(), 1
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
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        elif _is_array_of_tables(value):
            for number, entry in enumerate(value):
                yield f"{prefix}{key}.{number}"
                yield from _dotted(entry, f"{prefix}{key}.{number}.")


def _lines(table: Mapping[str, Any], path: tuple[str, ...], opening: str = "[{}]") -> Iterator[str]:
    plain = {
        key: value
        for key, value in table.items()
        if not isinstance(value, Mapping) and not (_is_array_of_tables(value))
    }
    if path and (plain or not table or opening != "[{}]"):
        yield "\n" + opening.format(".".join(map(_key, path)))
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, key))
        elif _is_array_of_tables(value):
            for entry in value:
                yield from _lines(entry, (*path, key), "[[{}]]")


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # TOML and JSON escape alike, except that TOML requires DEL to be escaped and json.dumps does not escape it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, date | time):
        return value.isoformat()
    return _string(value) if isinstance(value, str) else repr(value)
