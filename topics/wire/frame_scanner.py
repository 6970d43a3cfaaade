"""Scanners: functions that read chosen fields of a frame in one pass, and only find where its arrays lie.

A scanner is written from a schema, as one straight function, and costs a fifth of `codec.decode`. It is sure of what it
returns: anything that the decoder might read in another way raises an error, and the caller decodes the frame. Tests
compare both on mutated frames (docs/decisions/0063-two-readers-of-a-rollout.md).
"""

import struct
from collections.abc import Callable, Collection
from typing import Any

from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import Schema

ScanFrame = Callable[[bytes], tuple[Any, ...] | None]
"""From a value to the chosen fields of its record; None if the value must be decoded."""
Scan = Callable[[bytes, int], tuple[Any, ...]]
"""From a value and the offset of a record's first field in it to the chosen fields and the offset of the end."""
SCAN_ERRORS = (ValueError, IndexError, struct.error)
"""What a scanner raises if it is not sure of a frame."""


def frame_scanner(record: str, chosen: Collection[str]) -> ScanFrame:
    """Return the scanner of frames of a record's newest schema, as `scanner` describes it."""
    schema = codec.schemas()[record][-1]
    begin, scan = codec.MAGIC + schema.fingerprint, scanner(schema, chosen)

    def scan_frame(value: bytes) -> tuple[Any, ...] | None:
        at = codec.begin_of(value)
        if not value.startswith(begin, at):
            return None
        try:
            *fields, end = scan(value, at + codec.HEADER_SIZE)
        except SCAN_ERRORS:
            return None
        return tuple(fields) if end == len(value) or codec.is_signature(value[end:]) else None

    return scan_frame


def scanner(schema: Schema, chosen: Collection[str]) -> Scan:
    """Return the scanner of the fields in `chosen`, in the order of the schema, followed by the end of the record.

    Fields of nested records are named with dots. A field of bytes yields two offsets, its begin and its end; an array
    yields a list and a map a dict, whose entries are tuples if several fields of an entry are chosen.
    """
    lines = ["def scan(d, p):"]
    names = _Writer(lines, frozenset(chosen)).fields(schema.source["fields"], "", "    ")
    lines.append(f"    return {', '.join(names)}, p")
    namespace: dict[str, Any] = {"number": _number, "size": _size, "double": struct.Struct("<d").unpack_from}
    exec("\n".join(lines), namespace)
    scan: Scan = namespace["scan"]
    return scan


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number in Avro's zigzag encoding at an offset, and the offset after it."""
    number = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128 and number < 2**64:
            return (number >> 1) ^ -(number & 1), at
    raise ValueError("a number of more than 64 bits")


def _size(data: bytes, at: int) -> tuple[int, int]:
    number, at = _number(data, at)
    if number < 0:
        raise ValueError("a negative size")
    return number, at


class _Writer:
    """Writes the lines that read one field after another."""

    def __init__(self, lines: list[str], chosen: frozenset[str]) -> None:
        self._lines, self._chosen = lines, chosen
        self._count = 0

    def fields(self, fields: list[dict[str, Any]], above: str, indent: str) -> list[str]:
        """Write the lines for the fields of a record; return the expressions of those that are chosen."""
        return [name for field in fields for name in self._value(field["type"], f"{above}{field['name']}", indent)]

    def _add(self, indent: str, *lines: str) -> None:
        self._lines.extend(indent + line for line in lines)

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _take_number(self, indent: str, reader: str) -> None:
        # 129: the bit of a number of several bytes, and the bit of a negative number.
        self._add(indent, "n = d[p]", "p += 1", f"if n & 129: n, p = {reader}(d, p - 1)", "else: n >>= 1")

    def _value(self, schema: Any, path: str, indent: str) -> list[str]:
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind == "record":
            return self.fields(schema["fields"], f"{path}.", indent)
        if kind in ("array", "map"):
            return self._blocks(schema, path, indent)
        name = self._name()
        if kind in ("int", "long"):
            self._take_number(indent, "number")
            self._add(indent, f"{name} = n")
        elif kind == "string":
            self._take_number(indent, "size")
            self._add(indent, f"{name} = d[p:p + n].decode()", "p += n")
        elif kind == "bytes":
            self._take_number(indent, "size")
            self._add(indent, f"{name} = p", "p += n", f"{name}e = p")
        elif kind == "double":
            self._add(indent, f"{name}, = double(d, p)", "p += 8")
        elif kind == "boolean":
            self._add(indent, f"{name} = (False, True)[d[p]]", "p += 1")
        elif kind == "enum":
            symbols = [symbol for symbol in schema["symbols"] for _ in range(2)]
            self._add(indent, "n = d[p]", "p += 1", "if n & 1: raise ValueError", f"{name} = {tuple(symbols)}[n]")
        else:
            raise TypeError(f"a scanner knows no schema of type {kind}")
        if path not in self._chosen:
            return []
        return [name, f"{name}e"] if kind == "bytes" else [name]

    def _blocks(self, schema: dict[str, Any], path: str, indent: str) -> list[str]:
        """Write the loop over an array or a map. It leaves a block that begins with its size to the decoder."""
        is_map = schema["type"] == "map"
        entries, inner = self._name(), indent + 8 * " "
        self._add(indent, f"{entries} = {'{}' if is_map else '[]'}", "n = d[p]", "while n:")
        self._take_number(indent + "    ", "size")
        self._add(indent + "    ", "if not n: raise ValueError", "for _ in range(n):")
        if is_map:
            self._take_number(inner, "size")
            self._add(inner, f"{entries}k = d[p:p + n].decode()", "p += n")
        names = self._value(schema["values" if is_map else "items"], path, inner)
        if names:
            entry = names[0] if len(names) == 1 else f"({', '.join(names)})"
            self._add(inner, f"{entries}[{entries}k] = {entry}" if is_map else f"{entries}.append({entry})")
        self._add(indent + "    ", "n = d[p]")
        self._add(indent, "p += 1")
        return [entries] if names else []
