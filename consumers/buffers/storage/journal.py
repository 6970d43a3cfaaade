"""Journals of the buffers on disk: append-only files of records, each with its size and checksum.

A record reaches the operating system before `append` returns, so it survives the process; `sync` writes it to disk, so
it survives a crash of the machine. Readers cut off an incomplete record at the end; damage before another record is
reported. A clean close appends a mark, so damage of a closed journal is never taken for an incomplete record.
"""

import contextlib
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from rollstream.topics.files.atomic_files import StoreError, replacing

LEAST_BYTES = 2**20
"""A journal is long when it has grown by more bytes than this plus a sixteenth of its first records."""
_HEAD = struct.Struct("<III")
"""Size, its complement, and checksum of the payload; the complement tells where a record may begin."""
_ONES = 2**32 - 1
_CLOSED = b"closed"
_ENCODER = msgspec.msgpack.Encoder()
Record = TypeVar("Record")
Part = TypeVar("Part")
_RAW: msgspec.msgpack.Decoder[msgspec.Raw] = msgspec.msgpack.Decoder(msgspec.Raw)


class NoJournal(StoreError, FileNotFoundError):
    """There is no journal."""


class JournalReading(NamedTuple, Generic[Record]):
    """The records read from a journal."""

    records: list[Record]
    stop: int
    """Byte at which the next record begins."""
    damaged: bool
    """Whether a whole record follows `stop`, so that there is more than one incomplete record."""
    closed: bool
    """Whether a writer closed the journal after everything in it, so that all of it was on disk."""


def read_journal(path: Path, decoder: msgspec.msgpack.Decoder[Record]) -> JournalReading[Record]:
    """Read the complete records. Raises NoJournal, or StoreError if the file is unreadable or not a journal."""
    with closing(JournalFollower(path, decoder)) as follower:
        return follower.read()


class JournalFollower(Generic[Record]):
    """Reads a journal while its writer appends to it.

    The file stays open: the file system could otherwise give its inode to the file that replaces it.
    """

    def __init__(self, path: Path, decoder: msgspec.msgpack.Decoder[Record]) -> None:
        """Open the journal. Raises NoJournal or StoreError."""
        self._path, self._decoder = path, decoder
        self._stop = 0
        with self._failing():
            # Unbuffered, because the file grows.
            self._file = path.open("rb", buffering=0)

    @property
    def replaced(self) -> bool:
        """Whether the path names another file now, or none."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            return True

    def read(self) -> JournalReading[Record]:
        """Read the complete records after those read before. Raises StoreError."""
        pieces, read = list[bytes](), 0
        with self._failing():
            descriptor = self._file.fileno()
            # The descriptor's own position is shared with forked processes, which may move it at any moment.
            while piece := os.pread(descriptor, self._unread(read), self._stop + read):
                pieces.append(piece)
                read += len(piece)
        reading = self._reading_of(memoryview(b"".join(pieces)))
        self._stop = reading.stop
        return reading

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unread(self, read: int) -> int:
        """Number of bytes to ask for next; at least one, because only an empty answer shows the end of the file."""
        return max(1, os.fstat(self._file.fileno()).st_size - self._stop - read)

    def _reading_of(self, data: memoryview) -> JournalReading[Record]:
        """Return the complete records in the bytes from `stop` on. Raises StoreError for an unknown record."""
        records: list[Record] = []
        place, closed = 0, False
        while (payload := _payload_at(data, place)) is not None:
            closed = payload == _CLOSED
            try:
                if not closed:
                    records.append(self._decoder.decode(payload))
            except msgspec.MsgspecError as error:
                raise StoreError(
                    f"{self._path} has an unknown record at byte {self._stop + place} ({error}); it was not written by "
                    "this program: restore it, or fill a new buffer from the log"
                ) from error
            place += _HEAD.size + len(payload)
        later = list(_payloads_in(data[place:]))
        return JournalReading(records, self._stop + place, bool(later), closed or _CLOSED in later)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = NoJournal if isinstance(error, FileNotFoundError) else StoreError
            raise kind(
                f"{self._path} cannot be read ({error.strerror or error}); give a readable directory, or fill another "
                "from the log"
            ) from error


def write_journal(path: Path, *records: Any) -> None:
    """Replace a journal atomically by one with these records. Raises StoreError."""
    with replacing(path) as file:
        for record in records:
            file.write(_framed(_ENCODER.encode(record)))


def write_state(path: Path, state: Any, parts: Sequence[Any]) -> None:
    """Replace a journal atomically by one with a state and parts of it, which are records of their own because a record
    has at most 4 GiB. Raises StoreError."""
    write_journal(path, len(parts), state, *parts)


def read_state(path: Path, kind: type[Record], part: type[Part]) -> tuple[Record, list[Part]]:
    """Read what `write_state` wrote. Raises NoJournal, or StoreError if it is damaged."""
    records = read_journal(path, _RAW).records
    try:
        if not records or msgspec.msgpack.decode(records[0]) != len(records) - 2:
            raise ValueError("records are missing")
        parts = msgspec.msgpack.Decoder(part)
        return msgspec.msgpack.decode(records[1], type=kind), list(map(parts.decode, records[2:]))
    except ValueError as error:
        raise StoreError(
            f"{path} is damaged ({error}): its content differs from what was written; restore it from a copy, or start "
            "with an empty directory and fill it again"
        ) from error


class Journal:
    """Appends to an existing journal, for its only writer, until `close` or garbage collection."""

    def __init__(self, path: Path, stop: int) -> None:
        """Open the journal and cut it off at `stop`. Raises StoreError."""
        self.path = path
        self.size_bytes = stop
        self._first_bytes = 0
        """Size of the records that the journal began with when it was last replaced."""
        try:
            self._open()
            os.ftruncate(self._descriptor, stop)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror or error}); check the permissions there"
            ) from error

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY)
        self._closing = weakref.finalize(self, os.close, self._descriptor)

    @property
    def long(self) -> bool:
        """Whether the journal has grown so much that its owner should replace it by one with its state."""
        return self.size_bytes > LEAST_BYTES + self._first_bytes + self._first_bytes // 16

    def append(self, record: Any, *, sync: bool = False) -> None:
        """Write one record, with `sync` to disk. Raises StoreError if that fails; nothing is written then."""
        self._append(_ENCODER.encode(record), sync)

    def append_closed(self) -> None:
        """Write the mark of a clean close to disk. Raises StoreError."""
        self._append(_CLOSED, sync=True)

    def _append(self, payload: bytes, sync: bool) -> None:
        data = memoryview(_framed(payload))
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self.size_bytes + done)
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # The next append overwrites what is left.
                os.ftruncate(self._descriptor, self.size_bytes)
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror or error}); nothing was stored. Check the free space "
                "and the permissions there, then try again"
            ) from error
        self.size_bytes += len(data)

    def sync(self) -> None:
        """Write every record to disk. Raises StoreError."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise StoreError(f"{self.path} could not be synced ({error.strerror or error}); check the disk") from error

    def replace(self, *records: Any) -> None:
        """Replace the file atomically by one with these records, and continue there. Raises StoreError; the file may
        still be replaced then."""
        try:
            write_journal(self.path, *records)
        finally:
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                self._closing()
                self._open()
                self.size_bytes = self._first_bytes = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        self._closing()


def _framed(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), len(payload) ^ _ONES, zlib.crc32(payload)) + payload


def _payload_at(data: memoryview, place: int) -> memoryview | None:
    """Payload of the whole record at a place; None if there is none."""
    if place + _HEAD.size > len(data):
        return None
    size, complement, checksum = _HEAD.unpack_from(data, place)
    payload = data[place + _HEAD.size : place + _HEAD.size + size]
    whole = size ^ complement == _ONES and len(payload) == size and zlib.crc32(payload) == checksum
    return payload if whole else None


def _payloads_in(data: memoryview) -> Iterator[memoryview]:
    """Payloads of the whole records that begin anywhere in these bytes."""
    for shift in range(min(4, len(data))):
        words = np.frombuffer(data[shift:], "<u4", (len(data) - shift) // 4)
        for word in np.flatnonzero(words[:-1] ^ words[1:] == _ONES).tolist():
            payload = _payload_at(data, shift + 4 * word)
            if payload is not None:
                yield payload
