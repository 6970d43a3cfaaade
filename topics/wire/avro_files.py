"""Avro container files: writes files of rollouts, and reads files of any schema block by block, so that a damaged block
does not affect any other.

Pickle is not used, so nothing in a file is ever executed. Files of unknown origin are read in bounded memory: the size
of an unpacked block is limited, each record takes at least one byte of its block, and schemas have limits.

A schema comes from the writer of the file, and readers follow it. A record that contains itself overflows the stack of
a reader in C, and a block can claim billions of items that take no bytes. Within the limits, the memory that a file
needs is proportional to its size.
"""

import bz2
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import fastavro
from fastavro.schema import SchemaParseException

from rollstream.topics.errors import RecordError, brief
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import PARSE_ERRORS, record_of, schemas, values_of

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


BLOCK_LIMIT_BYTES = 128 * 1024 * 1024
"""Largest size of an unpacked block."""
_XZ_BYTES = 256 * 1024 * 1024
"""Memory for unpacking xz: its header may ask for a dictionary of gigabytes."""
_DAMAGE = (
    *PARSE_ERRORS,
    AttributeError,
    NotImplementedError,
    RecursionError,
    MemoryError,
    RecordError,
    SchemaParseException,
    zlib.error,
    lzma.LZMAError,
    OSError,
)
"""What fastavro and the codecs raise for bytes of unknown origin, whose schema may be anything: every one is damage."""
_SYNC_BYTES = 16
_CODEC = "avro.codec"
_HEADER = fastavro.parse_schema(
    {
        "type": "record",
        "name": "Header",
        "fields": [
            {"name": "magic", "type": {"type": "fixed", "name": "Magic", "size": 4}},
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "Sync", "size": _SYNC_BYTES}},
        ],
    }
)


class ContainerRecord(NamedTuple):
    """A record of a container."""

    place: str
    """Byte offset of the record's block, and the record's number within the block."""
    values: Any
    """The record as fastavro returns it."""


class ContainerDamage(NamedTuple):
    """Part of a container that could not be read."""

    place: str
    records: int
    """Number of records lost, according to the file: at least 1, and at most the number of bytes in the block."""
    reason: str


def read_container(data: bytes) -> Iterator[ContainerRecord | ContainerDamage]:
    """Yield the records of an Avro container file in order; after damage, reading continues at the next block."""
    try:
        header, begin = _header(data)
        unpack = _unpacker(header["meta"])
        plain = _plain_header(header)
    except _DAMAGE as error:
        yield ContainerDamage("header", 1, brief(error))
        return
    sync, position = header["sync"], begin
    while position < len(data):
        block = str(position)
        try:
            claimed, first, end = _bounds(data, position, sync)
        except _DAMAGE as error:
            yield ContainerDamage(block, 1, brief(error))
            marker = data.find(sync, position)
            if marker < 0:
                return
            position = marker + _SYNC_BYTES
            continue
        number, packed = 0, data[first : end - _SYNC_BYTES]
        # A block that cannot be unpacked may claim any number.
        count = min(claimed, len(packed))
        try:
            block_bytes = unpack(packed)
            count = claimed if claimed <= len(block_bytes) else 1
            if count < claimed:
                raise ValueError(f"a block of {len(block_bytes)} bytes cannot hold {claimed} records")
            for values in fastavro.reader(io.BytesIO(plain + _block(count, block_bytes, sync))):
                yield ContainerRecord(f"{block}.{number}", values)
                number += 1
        except _DAMAGE as error:
            yield ContainerDamage(f"{block}.{number}", max(1, count - number), brief(error))
        position = end


def container_metadata(data: bytes) -> dict[str, bytes]:
    """Return the metadata in a container's header, schema and codec included.

    Raises RecordError if the bytes are not a container.
    """
    try:
        meta: dict[str, bytes] = _header(data)[0]["meta"]
    except _DAMAGE as error:
        raise RecordError(f"not an Avro container file ({brief(error)})") from error
    return meta


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    stream = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(stream, _HEADER, None)
    if header["magic"] != b"Obj\x01":
        raise ValueError("it does not begin like an Avro container file")
    check_schema(json.loads(header["meta"]["avro.schema"]))
    return header, stream.tell()


def _plain_header(header: Mapping[str, Any]) -> bytes:
    """Return the header of a file with the same schema and uncompressed blocks."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, _HEADER, {**header, "meta": {**header["meta"], _CODEC: b"null"}})
    return out.getvalue()


def _block(count: int, data: bytes, sync: bytes) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, "long", count)
    fastavro.schemaless_writer(out, "long", len(data))
    return out.getvalue() + data + sync


def _unpacker(meta: Mapping[str, bytes]) -> Callable[[bytes], bytes]:
    """Return a function that unpacks a block, or raises an error if it is damaged or too large."""
    codec = meta.get(_CODEC, b"null").decode()
    if codec == "null":
        return lambda data: data
    makers: dict[str, Callable[[], Any]] = {
        "deflate": lambda: zlib.decompressobj(-zlib.MAX_WBITS),
        "bzip2": bz2.BZ2Decompressor,
        "xz": lambda: lzma.LZMADecompressor(memlimit=_XZ_BYTES),
    }
    if codec not in makers:
        raise ValueError(
            f"its blocks are compressed with {codec!r}; write it again with one of null, {', '.join(makers)}"
        )

    def unpack(data: bytes) -> bytes:
        unpacker = makers[codec]()
        unpacked: bytes = unpacker.decompress(data, BLOCK_LIMIT_BYTES + 1)
        if len(unpacked) > BLOCK_LIMIT_BYTES:
            raise ValueError(f"a block is larger than {BLOCK_LIMIT_BYTES:,} bytes unpacked; write smaller blocks")
        return unpacked

    return unpack


def _bounds(data: bytes, position: int, sync: bytes) -> tuple[int, int, int]:
    """Return the number of records in the block at `position`, where its data begins, and where the block ends.

    Raises ValueError if the block is not whole.
    """
    stream = io.BytesIO(data)
    stream.seek(position)
    count: Any = fastavro.schemaless_reader(stream, "long", None)
    size: Any = fastavro.schemaless_reader(stream, "long", None)
    first = stream.tell()
    end = first + size + _SYNC_BYTES
    if count < 0 or size < 0 or end > len(data) or data[end - _SYNC_BYTES : end] != sync:
        raise ValueError("the block is not whole")
    return count, first, end


def write_rollouts(file: BinaryIO, rollouts: Iterable[Rollout], metadata: dict[str, str]) -> None:
    """Write rollouts as an Avro container file with the newest schema. Raises RecordError if an array does not fit."""
    schema = schemas()[Rollout.__name__][-1].parsed
    fastavro.writer(file, schema, map(values_of, rollouts), codec="deflate", metadata=metadata)


def read_rollouts(data: bytes) -> list[Rollout]:
    """Return the rollouts of a file that `write_rollouts` wrote. Raises RecordError if the file is damaged."""
    rollouts = []
    for item in read_container(data):
        if isinstance(item, ContainerDamage):
            raise RecordError(f"a file of rollouts is damaged at {item.place}: {item.reason}")
        rollouts.append(record_of(Rollout, item.values))
    return rollouts
