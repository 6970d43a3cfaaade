"""Avro container files: rollouts written whole, and records of any schema read block by block, so that one that is
damaged costs no other.

No pickle, and nothing of a file is ever run.
"""

import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import fastavro

from topics.codec import record_of, schemas, values_of
from topics.errors import RecordError
from topics.records import Rollout

_SYNC_BYTES = 16
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


class Found(NamedTuple):
    """A record of a container."""

    place: str
    """Where: the offset of its block in bytes, and its number within that."""
    values: Any
    """As fastavro returns it."""


class Damaged(NamedTuple):
    """What of a container could not be read."""

    place: str
    records: int
    """How many that were, as far as the file says; at least 1."""
    reason: str


def read_container(data: bytes) -> Iterator[Found | Damaged]:
    """The records of an Avro container file, in order, and what of it is damaged: reading goes on at the next block."""
    try:
        header, begin = _header(data)
    except Exception as error:  # bytes of unknown origin can fail anywhere in the parser; all of it means one thing
        yield Damaged("header", 1, _why(error))
        return
    sync, position = header["sync"], begin
    while position < len(data):
        block = str(position)
        count = 1
        try:
            count, end = _bounds(data, position, sync)
        except Exception as error:  # as above
            yield Damaged(block, 1, _why(error))
            marker = data.find(sync, position)
            if marker < 0:
                return
            position = marker + _SYNC_BYTES
            continue
        number = 0
        try:
            for values in fastavro.reader(io.BytesIO(data[:begin] + data[position:end])):
                yield Found(f"{block}.{number}", values)
                number += 1
        except Exception as error:  # as above
            yield Damaged(f"{block}.{number}", max(1, count - number), _why(error))
        position = end


def container_metadata(data: bytes) -> dict[str, bytes]:
    """What the header of a container says beside schema and codec. Raises RecordError for what is no container."""
    try:
        meta: dict[str, bytes] = _header(data)[0]["meta"]
    except Exception as error:  # as above
        raise RecordError(f"no Avro container file ({_why(error)})") from error
    return meta


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    stream = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(stream, _HEADER, None)
    if header["magic"] != b"Obj\x01":
        raise ValueError("it does not begin as an Avro container file does")
    json.loads(header["meta"]["avro.schema"])
    return header, stream.tell()


def _bounds(data: bytes, position: int, sync: bytes) -> tuple[int, int]:
    """Records of the block there, and where it ends. Raises ValueError where no whole block is."""
    stream = io.BytesIO(data)
    stream.seek(position)
    count: Any = fastavro.schemaless_reader(stream, "long", None)
    size: Any = fastavro.schemaless_reader(stream, "long", None)
    end = stream.tell() + size + _SYNC_BYTES
    if count < 0 or size < 0 or end > len(data) or data[end - _SYNC_BYTES : end] != sync:
        raise ValueError("the block is not whole")
    return count, end


def _why(error: Exception) -> str:
    # Not the error's repr: that of a UnicodeDecodeError holds all the bytes.
    return f"{type(error).__name__}: {error}"[:200]


def write_rollouts(file: BinaryIO, rollouts: Iterable[Rollout], metadata: dict[str, str]) -> None:
    """Write rollouts as an Avro container file with the newest schema. Raises RecordError for one that does not fit."""
    schema = schemas()[Rollout.__name__][-1].parsed
    fastavro.writer(file, schema, map(values_of, rollouts), codec="deflate", metadata=metadata)


def read_rollouts(data: bytes) -> list[Rollout]:
    """The rollouts of a container file of ours. Raises RecordError for one that is not whole."""
    found = []
    for item in read_container(data):
        if isinstance(item, Damaged):
            raise RecordError(f"a file of rollouts is damaged at {item.place}: {item.reason}")
        found.append(record_of(Rollout, item.values))
    return found
