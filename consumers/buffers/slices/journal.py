"""The journal of a slice buffer: changes of its ring, as atomic records.

A record reaches the operating system before `append` returns, so it survives the process; `sync` writes it to disk, so
it survives a crash of the machine. Opening the journal cuts off an incomplete record at its end; damage before that is
an error.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollstream.consumers.files.atomic_files import StoreError, replacing


class EpisodeSteps(msgspec.Struct, array_like=True, frozen=True):
    """The next `steps` steps of the ring belong to an episode."""

    episode: int
    steps: int
    uid: str = ""
    """Uid of an episode that is or was open; empty if the episode begins and ends here."""
    last: bool = True
    """Whether the episode ends. If so, no episode stays open under its uid; if not, this episode is open."""
    begin: int = 0
    """Number of steps of the episode before these, needed if the episode is new; 0 if it is unknown."""


class AddRecord(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    """Steps were written at the head, and the position of a partition moved with them."""

    runs: tuple[EpisodeSteps, ...]
    at: tuple[int, int] | None
    """Partition and offset of the record that the steps came from."""
    draws: int


class ReserveRecord(msgspec.Struct, array_like=True, frozen=True, tag="r"):
    """Steps below counter `stop` may now overwrite the steps whose counters are lower by the capacity."""

    stop: int


class ReserveOnDiskRecord(msgspec.Struct, array_like=True, frozen=True, tag="s"):
    """Like ReserveRecord, but on disk before any step below `stop` is written, in case the machine crashes."""

    stop: int


class FlushRecord(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """All earlier records and steps are on disk."""

    draws: int


class CloseRecord(msgspec.Struct, array_like=True, frozen=True, tag="c"):
    """All earlier records were on disk before this one, so damage before it is not due to a crash of the machine."""


class OpenRecord(msgspec.Struct, array_like=True, frozen=True, tag="o"):
    """A writer opened the journal during this boot of the machine."""

    boot: str


class SnapshotRecord(msgspec.Struct, array_like=True, frozen=True, tag="w"):
    """The whole state, which replaces all earlier records; it is on disk."""

    columns: Mapping[str, bytes]
    """Columns of the episode index; int64, little-endian."""
    open: Mapping[str, int]
    position: Mapping[int, int]
    head: int
    low: int
    following: int
    draws: int
    taken: Mapping[int, tuple[str, ...]]


Record = AddRecord | ReserveRecord | ReserveOnDiskRecord | FlushRecord | CloseRecord | OpenRecord | SnapshotRecord

_HEAD = struct.Struct("<III")
"""Size, its complement, and checksum of the payload; the complement tells a damaged size from an incomplete record."""
_ONES = 2**32 - 1
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_ENCODER = msgspec.msgpack.Encoder()


class JournalReading(NamedTuple):
    """The records read from a journal."""

    records: list[Record]
    stop: int
    """Byte at which the next record begins."""
    damaged: bool
    """Whether the bytes from `stop` on are more than one incomplete record."""
    was_on_disk: bool
    """Whether the damaged part was on disk, because a writer closed the journal after it."""


def read_journal(path: Path) -> JournalReading:
    """Read the complete records. Raises StoreError if the file is unreadable or not a journal."""
    with closing(JournalFollower(path)) as follower:
        return follower.read()


class JournalFollower:
    """Reads a journal while its writer appends to it.

    The file stays open: the file system could otherwise give its inode to the file that replaces it.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal. Raises StoreError."""
        self._path = path
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

    def read(self) -> JournalReading:
        """Read the complete records after those read before. Raises StoreError."""
        data = bytearray()
        with self._failing():
            descriptor = self._file.fileno()
            # The descriptor's own position is shared with forked processes, which may move it at any moment.
            while piece := os.pread(descriptor, self._unread(len(data)), self._stop + len(data)):
                data += piece
        reading = _reading_of(bytes(data), self._stop, self._path)
        self._stop = reading.stop
        return reading

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unread(self, read: int) -> int:
        """Number of bytes to ask for next; at least one, because only an empty answer shows the end of the file."""
        return max(1, os.fstat(self._file.fileno()).st_size - self._stop - read)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{self._path} cannot be read ({error.strerror or error}); fill the buffer from the log"
            ) from error


def _reading_of(data: bytes, start: int, path: Path) -> JournalReading:
    """Return the complete records in the bytes of a journal from byte `start` on. Raises StoreError."""
    records: list[Record] = []
    place, damaged = 0, False
    while place + _HEAD.size <= len(data):
        size, complement, checksum = _HEAD.unpack_from(data, place)
        if size ^ complement != _ONES:
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
            raise StoreError(
                f"{path} has an unknown record at byte {start + place} ({error}); fill the buffer from the log"
            ) from error
        place = stop
    return JournalReading(records, start + place, damaged, damaged and _frame(CloseRecord()) in data[place:])


def write_journal(path: Path, *records: Record) -> None:
    """Replace a journal atomically by one with these records. Raises StoreError."""
    with replacing(path) as file:
        for record in records:
            file.write(_frame(record))


class SliceJournal:
    """Appends to an existing journal, for its only writer."""

    def __init__(self, path: Path, stop: int) -> None:
        """Open the journal and cut it off at `stop`. Raises StoreError."""
        self._path = path
        self.size_bytes = stop
        try:
            self._descriptor = os.open(path, os.O_WRONLY)
            os.ftruncate(self._descriptor, stop)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror or error}); check the permissions there"
            ) from error

    def append(self, record: Record) -> None:
        """Write one record. Raises StoreError if that fails; nothing is written then."""
        data = memoryview(_frame(record))
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self.size_bytes + done)
        except OSError as error:
            os.ftruncate(self._descriptor, self.size_bytes)
            raise StoreError(
                f"{self._path} cannot be written ({error.strerror or error}); nothing was stored. Check the "
                "free space there, then add again"
            ) from error
        self.size_bytes += len(data)

    def sync(self) -> None:
        """Write every record to disk. Raises StoreError."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise StoreError(f"{self._path} could not be synced ({error.strerror or error}); check the disk") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _frame(record: Record) -> bytes:
    payload = _ENCODER.encode(record)
    return _HEAD.pack(len(payload), len(payload) ^ _ONES, zlib.crc32(payload)) + payload
