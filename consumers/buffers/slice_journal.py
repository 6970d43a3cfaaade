"""The journal of a slice buffer: what happened to its ring, one record after another, whole or not there.

A record is handed to the operating system before the call that makes it returns, so it outlives the process; `sync`
has it on disk, for the machine. A tail that a kill tore is cut off, damage before the tail is an error.
"""

import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from consumers.buffers.files import StoreError, replacing


class Run(msgspec.Struct, array_like=True, frozen=True):
    """The next `steps` steps, which belong to an episode."""

    episode: int
    steps: int
    uid: str = ""
    """Of an episode that is or was open."""
    last: bool = True
    """Whether nothing is open under that uid from now on; else this episode is."""


class Added(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    """Steps were written, from the head on, and the position of a partition moved with them."""

    runs: tuple[Run, ...]
    at: tuple[int, int] | None
    """Partition and offset of what they came from."""
    draws: int


class Reserved(msgspec.Struct, array_like=True, frozen=True, tag="r"):
    """Steps up to counter `stop` may be overwriting those one capacity before them from now on."""

    stop: int


class Ahead(msgspec.Struct, array_like=True, frozen=True, tag="s"):
    """As Reserved, for a machine that stops: on disk before anything up to `stop` is overwritten."""

    stop: int


class Flushed(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """Everything before is on disk."""

    draws: int


class Closed(msgspec.Struct, array_like=True, frozen=True, tag="c"):
    """Everything before was on disk before this was written: damage before it is no tail that a machine lost."""


class Opened(msgspec.Struct, array_like=True, frozen=True, tag="o"):
    """A writer began, since this start of the machine."""

    boot: str


class Whole(msgspec.Struct, array_like=True, frozen=True, tag="w"):
    """Everything there is, in place of all records before; it is on disk."""

    columns: Mapping[str, bytes]
    """Of the episode index; int64, little-endian."""
    open: Mapping[str, int]
    position: Mapping[int, int]
    head: int
    low: int
    following: int
    draws: int


Record = Added | Reserved | Ahead | Flushed | Closed | Opened | Whole

_HEAD = struct.Struct("<III")
"""Size, its bits turned over, and the checksum of what follows: a size that is damaged does not pass for a torn end."""
_ONES = 2**32 - 1
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_ENCODER = msgspec.msgpack.Encoder()


class Read(NamedTuple):
    """What was read of a journal."""

    records: list[Record]
    stop: int
    """Where the next record begins."""
    damaged: bool
    """Whether more follows than one record that is being written or was torn."""
    was_on_disk: bool
    """Whether what is damaged had been on disk: its writer closed the journal after it."""


def read_journal(path: Path, start: int = 0) -> Read:
    """The records from a place on, as far as they are whole. Raises StoreError where there is no journal of ours."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror or error}); fill the buffer from the log") from error
    records: list[Record] = []
    place, damaged = 0, False
    while place + _HEAD.size <= len(data):
        size, turned, checksum = _HEAD.unpack_from(data, place)
        if size ^ turned != _ONES:
            damaged = True
            break
        stop = place + _HEAD.size + size
        payload = memoryview(data)[place + _HEAD.size : stop]
        if stop > len(data) or zlib.crc32(payload) != checksum:
            damaged = stop < len(data)
            break
        try:
            records.append(_DECODER.decode(payload))
        except msgspec.MsgspecError as error:
            raise StoreError(f"{path} has no record of ours at byte {start + place} ({error})") from error
        place = stop
    return Read(records, start + place, damaged, damaged and _framed(Closed()) in data[place:])


def write_journal(path: Path, *records: Record) -> None:
    """Begin a journal with these records, in place of what was there, on disk. Raises StoreError."""
    with replacing(path) as file:
        for record in records:
            file.write(_framed(record))


class Journal:
    """Appends to a journal, which must be there; whoever has it alone writes."""

    def __init__(self, path: Path, stop: int) -> None:
        """Go on at `stop`; what lies behind it is cut off. Raises StoreError."""
        self._path = path
        self.size_bytes = stop
        try:
            self._descriptor = os.open(path, os.O_WRONLY)
            os.ftruncate(self._descriptor, stop)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror or error}); look at the rights there"
            ) from error

    def append(self, record: Record) -> None:
        """Write one record. Raises StoreError where it cannot be written, and then none of it is there."""
        data = memoryview(_framed(record))
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self.size_bytes + done)
        except OSError as error:
            os.ftruncate(self._descriptor, self.size_bytes)
            raise StoreError(
                f"{self._path} cannot be written ({error.strerror or error}); nothing of this is stored. Look at the "
                "space there, then add again"
            ) from error
        self.size_bytes += len(data)

    def sync(self) -> None:
        """Have every record on disk. Raises StoreError."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise StoreError(f"{self._path} is not on disk ({error.strerror or error}); look at the disk") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _framed(record: Record) -> bytes:
    payload = _ENCODER.encode(record)
    return _HEAD.pack(len(payload), len(payload) ^ _ONES, zlib.crc32(payload)) + payload
