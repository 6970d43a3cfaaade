"""Frames joined from pieces: an array of a record is given as the slices that it consists of, and copied once.

The pieces joined are byte for byte what `codec.encode` writes; tests compare both.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import Schema

Piece = bytes | memoryview
FramePieces = Callable[[Mapping[str, Any]], list[Piece]]
"""From the fields of a record to the pieces of its frame."""
_Write = Callable[[Any, list[Piece]], None]


def frame_pieces(schema: Schema, without: Collection[str] = ()) -> FramePieces:
    """Return the writer of a schema's frames, without the fields in `without`.

    It takes values as `codec.values_of` returns them, but a list of pieces for each field of bytes.
    """
    write = _record([field for field in schema.source["fields"] if field["name"] not in without])
    header = codec.MAGIC + schema.fingerprint

    def pieces(values: Mapping[str, Any]) -> list[Piece]:
        written: list[Piece] = [header]
        write(values, written)
        return written

    return pieces


def number_bytes(number: int) -> bytes:
    """Return a number in Avro's zigzag encoding."""
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    if rest < 128:
        return _SHORT[rest]
    digits = bytearray()
    while rest > 127:
        digits.append(rest & 127 | 128)
        rest >>= 7
    digits.append(rest)
    return bytes(digits)


_SHORT = [bytes((number,)) for number in range(128)]
_DOUBLE = struct.Struct("<d")


def _record(fields: Iterable[Mapping[str, Any]]) -> _Write:
    writers = [(field["name"], _writer(field["type"])) for field in fields]

    def write(values: Any, pieces: list[Piece]) -> None:
        for name, write_field in writers:
            write_field(values[name], pieces)

    return write


def _array(schema: Mapping[str, Any]) -> _Write:
    write_item = _writer(schema["items"])

    def write(items: Any, pieces: list[Piece]) -> None:
        if items:
            pieces.append(number_bytes(len(items)))
            for item in items:
                write_item(item, pieces)
        pieces.append(_SHORT[0])

    return write


def _enum(schema: Mapping[str, Any]) -> _Write:
    numbers = {symbol: number_bytes(number) for number, symbol in enumerate(schema["symbols"])}
    return lambda symbol, pieces: pieces.append(numbers[symbol])


def _text(text: str, pieces: list[Piece]) -> None:
    encoded = text.encode()
    pieces += (number_bytes(len(encoded)), encoded)


def _slices(slices: list[Piece], pieces: list[Piece]) -> None:
    pieces.append(number_bytes(sum(map(len, slices))))
    pieces += slices


_PLAIN: dict[str, _Write] = {
    "string": _text,
    "bytes": _slices,
    "int": lambda number, pieces: pieces.append(number_bytes(number)),
    "long": lambda number, pieces: pieces.append(number_bytes(number)),
    "double": lambda number, pieces: pieces.append(_DOUBLE.pack(number)),
    "boolean": lambda truth, pieces: pieces.append(_SHORT[truth]),
}


def _writer(schema: Any) -> _Write:
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind == "record":
        return _record(schema["fields"])
    if kind == "array":
        return _array(schema)
    return _enum(schema) if kind == "enum" else _PLAIN[kind]
