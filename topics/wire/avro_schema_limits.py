"""Limits on the schemas of Avro files of unknown origin, so that a few bytes cannot claim unbounded memory or depth.

A schema comes from the writer of the file, and readers follow it. A record that contains itself overflows the stack of
a reader in C, and a block can claim billions of items that take no bytes. Within the limits, the memory that a file
needs is proportional to its size.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

DEEPEST = 32
"""Deepest nesting of records, arrays, maps and unions."""
MOST_VALUES = 1000
"""Largest number of values in one record that take no bytes."""


class _Shape(NamedTuple):
    """The cost of one value of a schema."""

    depth: int
    values: int
    """Number of values in it that take no bytes, itself included."""
    empty: bool
    """Whether it takes no bytes itself."""


_PRIMITIVE = {
    "null": _Shape(1, 1, True),
    **dict.fromkeys(("boolean", "int", "long", "float", "double", "bytes", "string"), _Shape(1, 0, False)),
}


def check_schema(schema: Any) -> None:
    """Raise ValueError if records of a schema could take memory or depth out of proportion to their bytes."""
    _Walk().shape(schema, DEEPEST)


class _Walk:
    """One traversal of a schema; it knows the named types defined so far."""

    def __init__(self) -> None:
        # Keyed by the last part of the name, so that namespace rules cannot hide a type from the limits.
        self._named: dict[str, _Shape] = {}
        self._open: list[str] = []

    def shape(self, schema: Any, left: int) -> _Shape:
        """Return the shape of a schema that may be at most `left` levels deep."""
        if left <= 0:
            raise ValueError(f"its schema is more than {DEEPEST} levels deep")
        match schema:
            case str():
                shape = self._reference(schema)
            case list():
                shape = self._nested([self.shape(branch, left - 1) for branch in schema])._replace(empty=False)
            case {"type": "array", "items": items}:
                item = self.shape(items, left - 1)
                if item.empty:
                    raise ValueError("its schema has an array whose items take no bytes")
                shape = self._nested([item])._replace(empty=False)
            case {"type": "map", "values": values}:
                shape = self._nested([self.shape(values, left - 1)])._replace(empty=False)
            case {"type": "record" | "error", "name": str(name), "fields": list(fields)}:
                shape = self._define(name, self._record(name, fields, left))
            case {"type": "fixed", "name": str(name), "size": int(size)}:
                shape = self._define(name, _Shape(1, int(size == 0), size == 0))
            case {"type": "enum", "name": str(name)}:
                shape = self._define(name, _Shape(1, 0, False))
            case {"type": inner}:
                shape = self.shape(inner, left - 1)
            case _:
                raise ValueError(f"{str(schema)[:80]} is not an Avro schema")
        if shape.depth > left:
            raise ValueError(f"its schema is more than {DEEPEST} levels deep")
        if shape.values > MOST_VALUES:
            raise ValueError(f"its schema has records with more than {MOST_VALUES} values that take no bytes")
        return shape

    def _reference(self, name: str) -> _Shape:
        if name in _PRIMITIVE:
            return _PRIMITIVE[name]
        last = _last(name)
        if last in self._open:
            raise ValueError(f"its schema nests the record {name[:80]!r} within itself")
        if last not in self._named:
            raise ValueError(f"its schema names {name[:80]!r}, which it does not define")
        return self._named[last]

    def _record(self, name: str, fields: Iterable[Mapping[str, Any]], left: int) -> _Shape:
        self._open.append(_last(name))
        shape = self._nested([self.shape(field["type"], left - 1) for field in fields])
        self._open.pop()
        return shape

    def _nested(self, parts: Sequence[_Shape]) -> _Shape:
        depth = 1 + max((part.depth for part in parts), default=0)
        empty = all(part.empty for part in parts)
        return _Shape(depth, empty + sum(part.values for part in parts), empty)

    def _define(self, name: str, shape: _Shape) -> _Shape:
        # Two types may share the last part of their names; each then counts as the larger of the two.
        earlier = self._named.get(_last(name), shape)
        self._named[_last(name)] = _Shape(
            max(earlier.depth, shape.depth), max(earlier.values, shape.values), earlier.empty or shape.empty
        )
        return shape


def _last(name: str) -> str:
    return name.rpartition(".")[2]
