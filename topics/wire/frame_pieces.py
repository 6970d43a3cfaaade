"""Frame writers: functions that write a record's frame as pieces to be joined, so that its arrays are copied once.

A writer is written from a schema, as one straight function, and costs a quarter of fastavro's. Its frames are byte for
byte fastavro's; for a value that fastavro might write in another way, or refuse, it raises an error. Tests compare both
(docs/decisions/0063-two-readers-of-a-rollout.md).
"""

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

Piece = bytes | memoryview
FramePieces = Callable[[Any], list[Piece]]
"""From a record, or from its fields, to the pieces of its frame."""
WRITE_ERRORS = (TypeError, ValueError, AttributeError, KeyError, OverflowError, BufferError, struct.error)
"""What joining the pieces of a record raises if a writer is not sure of a value."""


def record_pieces(source: Mapping[str, Any], header: bytes) -> FramePieces:
    """Return the writer of a schema's records."""
    return _written(source["fields"], header, _RecordWriter)


def frame_pieces(source: Mapping[str, Any], header: bytes, without: Collection[str] = ()) -> FramePieces:
    """Return the writer of a schema's frames, without the fields in `without`.

    It takes values as `codec.values_of` returns them, but a list of pieces for each field of bytes.
    """
    return _written([field for field in source["fields"] if field["name"] not in without], header, _SlicesWriter)


def number_bytes(number: int) -> bytes:
    """Return a number in Avro's zigzag encoding. Raises TypeError or ValueError unless it is an int of 64 bits."""
    if type(number) is not int:
        raise TypeError("not an int")
    if not -(2**63) <= number < 2**63:
        raise ValueError("a number of more than 64 bits")
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    digits = bytearray()
    while rest > 127:
        digits.append(rest & 127 | 128)
        rest >>= 7
    digits.append(rest)
    return bytes(digits)


def _written(fields: Collection[Mapping[str, Any]], header: bytes, kind: type["_Writer"]) -> FramePieces:
    lines = ["def write(r):", "    p = [header]", "    a = p.append"]
    writer = kind(lines)
    writer.fields(fields, "r", "    ")
    namespace = {"header": header} | writer.names
    exec("\n".join([*lines, "    return p"]), namespace)
    write: FramePieces = namespace["write"]
    return write


class _Writer:
    """Writes the lines that write one field after another."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._named: dict[str, Any] = {}
        self.names: dict[str, Any] = {
            "number": number_bytes,
            "short": [bytes((2 * number,)) for number in range(64)],
            "encode": str.encode,
            "double": struct.Struct("<d").pack,
        }
        """What the lines refer to."""

    def fields(self, fields: Collection[Mapping[str, Any]], record: str, indent: str) -> None:
        """Write the lines for the fields of a record."""
        for field in fields:
            self._value(field["type"], self._field(record, field["name"]), indent)

    def _field(self, record: str, name: str) -> str:
        raise NotImplementedError

    def _bytes(self, schema: Any, value: str, indent: str) -> None:
        raise NotImplementedError

    def _add(self, indent: str, *lines: str) -> None:
        self._lines.extend(indent + line for line in lines)

    def _name(self, value: Any = None) -> str:
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def _value(self, schema: Any, value: str, indent: str) -> None:
        schema = self._named.get(schema, schema) if isinstance(schema, str) else schema
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in ("record", "enum"):
            self._named[schema["name"]] = schema
        if kind == "record":
            record = self._name()
            self._add(indent, f"{record} = {value}")
            self.fields(schema["fields"], record, indent)
        elif kind in ("array", "map"):
            self._block(schema, value, indent)
        elif kind in ("int", "long"):
            self._add(indent, f"n = {value}", "a(short[n] if 0 <= n < 64 else number(n))")
        elif kind == "string":
            self._add(indent, f"t = encode({value})", "n = len(t)", "a(short[n] if n < 64 else number(n))", "a(t)")
        elif kind == "bytes":
            self._bytes(schema, value, indent)
        elif kind == "double":
            self._add(indent, f"a(double({value}))")
        elif kind == "boolean":
            truths = self._name((number_bytes(0), b"\1"))
            self._add(indent, f"a({truths}[1 if {value} else 0])")
        elif kind == "enum":
            numbers = self._name({symbol: number_bytes(number) for number, symbol in enumerate(schema["symbols"])})
            self._add(indent, f"a({numbers}[{value}])")
        else:
            raise TypeError(f"a writer knows no schema of type {kind}")

    def _block(self, schema: Mapping[str, Any], value: str, indent: str) -> None:
        entries, item, inner = self._name(), self._name(), indent + 8 * " "
        self._add(indent, f"{entries} = {value}", f"n = len({entries})", "if n:", "    a(number(n))")
        if schema["type"] == "map":
            self._add(indent, f"    for {item}k, {item} in {entries}.items():")
            self._value("string", f"{item}k", inner)
            self._value(schema["values"], item, inner)
        else:
            self._add(indent, f"    for {item} in {entries}:")
            self._value(schema["items"], item, inner)
        self._add(indent, "a(short[0])")


class _RecordWriter(_Writer):
    """Takes records, whose arrays are numpy's."""

    def _field(self, record: str, name: str) -> str:
        return f"{record}.{name}"

    def _bytes(self, schema: Any, value: str, indent: str) -> None:
        if isinstance(schema, str):
            self._add(indent, f"t = {value}", "if type(t) is not bytes: raise TypeError", "a(number(len(t)))")
            self._add(indent, "a(t)")
        else:
            dtype = self._name(np.dtype(schema["dtype"]))
            self._add(indent, f"t = {value}", f"if t.dtype != {dtype} or t.ndim != 1: raise TypeError")
            self._add(indent, "a(number(t.nbytes))", "a(t.data)")


class _SlicesWriter(_Writer):
    """Takes mappings, whose arrays are lists of pieces."""

    def _field(self, record: str, name: str) -> str:
        return f"{record}[{name!r}]"

    def _bytes(self, _schema: Any, value: str, indent: str) -> None:
        self._add(indent, f"t = {value}", "a(number(sum(map(len, t))))", "p += t")
