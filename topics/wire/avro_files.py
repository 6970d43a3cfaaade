"""Avro container files: writes files of rollouts, and reads files of any schema block by block, so that a damaged block
does not affect any other.

Pickle is not used, so nothing in a file is ever executed. Files of unknown origin are read in bounded memory: the size
of an unpacked block is limited, each record takes at least one byte of its block, and schemas have limits.
"""

import bz2
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import fastavro
from fastavro.schema import SchemaParseException

from rollstream.topics.errors import RecordError, brief
from rollstream.topics.records import Rollout
from rollstream.topics.wire.avro_schema_limits import check_schema
from rollstream.topics.wire.codec import PARSE_ERRORS, record_of, schemas, values_of

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
