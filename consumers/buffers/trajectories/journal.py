"""The content of a directory of trajectories: an append-only file of 56-byte records, each with its checksum.

An entry contains its position in the log, so content and position change together. Opening the file cuts off an
incomplete append at its end, and refuses damage before the last append. A clean close appends a record; damage before
that record is never treated as an incomplete append.
"""

import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.trajectories.index import Description, TrajectoryEntry, TrajectoryIndex
from rollstream.consumers.buffers.trajectories.rows import Layout, LeafSpec
from rollstream.consumers.files.atomic_files import StoreError, sync_directory, write_bytes

NAME = "trajectory_index.log"
_HEADER, _TEXT, _ENTRY, _DROP, _POSITION, _STATE, _CLOSED = range(1, 8)
_MAGIC = b"rollstream trajectories, version 1".ljust(48)
_HEAD = [("crc", "<u4"), ("kind", "u1"), ("last", "u1"), ("append", "<u2")]
"""`append` numbers the appends; `last` is 1 in the last record of an append. An append is on disk before the next
begins."""
_APPENDS = 2**16
_RAW = np.dtype([*_HEAD, ("payload", "V48")])
ENTRY = np.dtype(
    [
        *_HEAD,
        ("id", "<i8"),
        ("uuid", "V16"),
        ("description", "<u4"),
        ("partition", "<i4"),
        ("offset", "<i8"),
        ("size_bytes", "<i8"),
    ]
)
"""One trajectory. `offset` is the next offset of `partition`, which is -1 for a trajectory that is not from the log.

Other kinds of record use the same fields: a drop has the first id that stays, a position has its partition and offset,
and a state has the next id, seed and draws.
"""


@dataclasses.dataclass(kw_only=True)
class JournalContent:
    """The content of a journal: trajectories, position and random state."""

    entries: NDArray[Any] = dataclasses.field(default_factory=lambda: np.empty(0, ENTRY))
    """Rows of dtype ENTRY, ids ascending; `description` is an index into `descriptions`."""
    descriptions: list[Description] = dataclasses.field(default_factory=list)
    layout: Layout = ()
    position: dict[int, int] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    draws: int = 0
    counter: int = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> TrajectoryEntry:
        row = self.entries[place]
        return TrajectoryEntry(
            int(row["id"]), row["uuid"].tobytes(), self.descriptions[row["description"]], int(row["size_bytes"])
        )

    @classmethod
    def of(cls, index: TrajectoryIndex, layout: Layout) -> "JournalContent":
        """Return the content of an index."""
        ids, uuids, descriptions, sizes, known = index.columns()
        entries = np.zeros(len(ids), ENTRY)
        entries["id"], entries["uuid"], entries["description"], entries["size_bytes"] = ids, uuids, descriptions, sizes
        entries["partition"] = -1
        return cls(entries=entries, descriptions=list(known), layout=layout, counter=index.counter)

    def part(self, begin: int, end: int) -> "JournalContent":
        """Return the same content with only the trajectories from place `begin` to before `end`."""
        return dataclasses.replace(self, entries=self.entries[begin:end])


class DecodedJournal(NamedTuple):
    """The content of a journal, and the state of its file."""

    content: JournalContent
    size_bytes: int
    """Size of the intact part."""
    appends: int
    """Number of the next append."""
    closed: bool
    """Whether the last record marks a clean close."""


class JournalEncoder:
    """Encodes records in the order in which they are appended; it omits descriptions that the file already has."""

    def __init__(self, descriptions: Iterable[Description] = (), layout: Layout = ()) -> None:
        self._descriptions = list(descriptions)
        """Descriptions in the file."""
        self._numbers = {description: number for number, description in enumerate(self._descriptions)}
        self._layout = layout

    def copy(self) -> "JournalEncoder":
        """Return a copy, for records that may fail to reach the disk."""
        return JournalEncoder(self._descriptions, self._layout)

    def entry(
        self,
        trajectory_id: int,
        uuid: bytes,
        description: Description,
        size_bytes: int,
        at: tuple[int, int] | None,
        layout: Layout,
    ) -> bytes:
        """Encode a trajectory; `at` is the position after its log record, if any."""
        texts = b""
        if layout != self._layout:
            self._layout = layout
            texts += _text({"layout": layout})
        if description not in self._numbers:
            self._numbers[description] = len(self._descriptions)
            self._descriptions.append(description)
            texts += _text({"about": description})
        partition, offset = at or (-1, 0)
        return texts + _record(
            _ENTRY,
            trajectory_id,
            uuid,
            self._numbers[description],
            partition=partition,
            offset=offset,
            size_bytes=size_bytes,
        )

    @staticmethod
    def drop(first_kept: int) -> bytes:
        """Encode that every trajectory with a lower id was removed."""
        return _record(_DROP, first_kept)

    @staticmethod
    def position(partition: int, offset: int) -> bytes:
        """Encode that every record of a partition before this offset was added or skipped."""
        return _record(_POSITION, partition=partition, offset=offset)

    @staticmethod
    def state(counter: int, seed: int, draws: int) -> bytes:
        """Encode the next id, the seed and the number of draws."""
        return _record(_STATE, counter, (seed % 2**128).to_bytes(16, "little"), offset=draws)


def encode(content: JournalContent) -> bytes:
    """Encode a whole journal with this content."""
    used, numbers = np.unique(content.entries["description"], return_inverse=True)
    # Descriptions that differed only in their folder are equal once the files are in one folder.
    distinct = dict.fromkeys(content.descriptions[number] for number in used)
    places = {description: place for place, description in enumerate(distinct)}
    renumbered = np.array([places[content.descriptions[number]] for number in used], np.uint32)
    entries = content.entries.copy()
    entries["description"], entries["kind"] = renumbered[numbers], _ENTRY
    texts = [_text({"layout": content.layout})] if content.layout else []
    texts += [_text({"about": description}) for description in places]
    positions = [JournalEncoder.position(partition, offset) for partition, offset in content.position.items()]
    state = JournalEncoder.state(content.counter, content.seed or 0, content.draws)
    return stamp(b"".join([_raw(_HEADER, _MAGIC), *texts, entries.tobytes(), *positions, state]), 0)


def stamp(records: bytes, append: int) -> bytes:
    """Write the number of an append and the checksums into its records."""
    rows = np.frombuffer(records, _RAW).copy()
    rows["append"], rows["last"][-1:] = append % _APPENDS, 1
    rows["crc"] = _checksums(rows.tobytes())
    return rows.tobytes()


def decode(data: bytes, where: Path) -> DecodedJournal:
    """Decode a journal. Raises StoreError if more than its last append is damaged."""
    records = np.frombuffer(data, _RAW, len(data) // _RAW.itemsize)
    sound = records["crc"] == _checksums(data)
    whole = _whole_records(records, sound)
    appends = _next_append(records[:whole])
    # An append starts only after all earlier data is on disk, so intact records of later appends prove real damage.
    later = records["append"][whole:][sound[whole:]] != appends
    if appends < 0 or records[0]["payload"].tobytes() != _MAGIC or later.any():
        raise StoreError(
            f"{where} is damaged at byte {whole * _RAW.itemsize} of {len(data)}, or was not written by this program; "
            "nothing was changed: restore it, or fill a new directory from the log"
        )
    records = records[:whole]
    kinds = records["kind"]
    descriptions, layout = _parse_texts(records["payload"][kinds == _TEXT].tobytes())
    fields = np.frombuffer(data, ENTRY, whole)
    entries = fields[kinds == _ENTRY]
    counter = int(entries["id"][-1]) + 1 if len(entries) else 0
    first_kept = int(fields["id"][kinds == _DROP].max(initial=0))
    states = fields[kinds == _STATE]
    content = JournalContent(
        entries=entries[entries["id"] >= first_kept],
        descriptions=descriptions,
        layout=layout,
        position=_positions(fields[((kinds == _ENTRY) & (fields["partition"] >= 0)) | (kinds == _POSITION)]),
        counter=max(counter, first_kept),
    )
    if len(states):
        content.seed = int.from_bytes(states[-1]["uuid"].tobytes(), "little")
        content.draws = int(states[-1]["offset"])
        content.counter = max(content.counter, int(states[-1]["id"]))
    return DecodedJournal(content, whole * _RAW.itemsize, appends, bool(kinds[-1] == _CLOSED))


class TrajectoryJournal:
    """The journal file of one directory, for its only writer."""

    def __init__(self, directory: Path, seed: int) -> None:
        """Open the file, or create it. Raises StoreError if it is damaged or cannot be written."""
        self.path = directory / NAME
        self.content = JournalContent()
        """Content at the time when the journal was opened or replaced."""
        self._size = self._appends = 0
        self._closed = False
        self._descriptor = -1
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            self.replace(JournalContent(seed=seed))
            return
        self._open(data)

    def append(self, records: bytes) -> None:
        """Write records to disk. Raises StoreError; readers then see none of them, and a retry is safe."""
        records = stamp(records, self._appends)
        try:
            # The write begins where the last complete append ends, and overwrites the remains of a failed attempt.
            written = os.pwrite(self._descriptor, records, self._size)
            if written != len(records):
                raise OSError(f"{written} of {len(records)} bytes written")
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # The next append overwrites what is left.
                os.ftruncate(self._descriptor, self._size)
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror or error}); check the free space and the permissions "
                "there, then write again"
            ) from error
        self._size += len(records)
        self._appends = (self._appends + 1) % _APPENDS
        self._closed = False

    @property
    def records(self) -> int:
        """Number of records in the file."""
        return self._size // _RAW.itemsize

    def encoder(self) -> JournalEncoder:
        """Return an encoder for the first append after `content`."""
        return JournalEncoder(self.content.descriptions, self.content.layout)

    def read(self) -> JournalContent:
        """Read the current content."""
        return decode(self.path.read_bytes()[: self._size], self.path).content

    def replace(self, content: JournalContent) -> None:
        """Replace the content atomically. Raises StoreError."""
        data = encode(content)
        try:
            write_bytes(self.path, data)
        except BaseException:
            # The file may have been replaced before the error, and appends to the old one would be lost.
            with contextlib.suppress(OSError, StoreError):
                self._open(self.path.read_bytes())
            raise
        # Decoded again, because `encode` leaves out descriptions without an entry, and renumbers the rest.
        self._open(data)

    def seal(self) -> None:
        """Append the record of a clean close, before which damage is always an error. Raises StoreError."""
        if not self._closed:
            self.append(_record(_CLOSED))
            self._closed = True

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, data: bytes) -> None:
        """Continue after the last complete record."""
        self.content, self._size, self._appends, self._closed = decode(data, self.path)
        self.close()
        self._descriptor = os.open(self.path, os.O_RDWR)
        os.ftruncate(self._descriptor, self._size)
        sync_directory(self.path.parent)


def read_content(directory: Path) -> JournalContent:
    """Read the journal of a directory. Raises FileNotFoundError, or StoreError if it is damaged."""
    path = directory / NAME
    return decode(path.read_bytes(), path).content


def write_content(directory: Path, content: JournalContent) -> None:
    """Replace the journal of a directory atomically. Raises StoreError."""
    write_bytes(directory / NAME, encode(content))


def _record(
    kind: int,
    trajectory_id: int = 0,
    uuid: bytes = b"",
    description: int = 0,
    *,
    partition: int = -1,
    offset: int = 0,
    size_bytes: int = 0,
) -> bytes:
    fields = np.zeros(1, ENTRY)
    fields[0] = (0, kind, 0, 0, trajectory_id, uuid.ljust(16, b"\0"), description, partition, offset, size_bytes)
    return fields.tobytes()


def _raw(kind: int, payload: bytes) -> bytes:
    return bytes(4) + kind.to_bytes(4, "little") + payload


def _text(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON document, which ends with a line feed, as records of text."""
    line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    line = line.ljust(-(-len(line) // 48) * 48, b"\n")
    return b"".join(_raw(_TEXT, line[i : i + 48]) for i in range(0, len(line), 48))


def _parse_texts(texts: bytes) -> tuple[list[Description], Layout]:
    descriptions: list[Description] = []
    layout: Layout = ()
    for line in texts.split(b"\n"):
        if line:
            document = json.loads(line)
            if "about" in document:
                descriptions.append(Description(*document["about"]))
            else:
                layout = tuple(LeafSpec(path, dtype, tuple(shape)) for path, dtype, shape in document["layout"])
    return descriptions, layout


def _positions(records: NDArray[Any]) -> dict[int, int]:
    """Return the last offset of each partition."""
    partitions, last = np.unique(records["partition"][::-1], return_index=True)
    offsets = records["offset"][::-1][last]
    return {int(partition): int(offset) for partition, offset in zip(partitions, offsets, strict=True)}


def _checksums(records: bytes) -> NDArray[np.uint32]:
    """Return the CRC-32 of each complete record, computed without the four bytes of the checksum itself."""
    raw, size = memoryview(records), _RAW.itemsize
    starts = range(0, len(raw) // size * size, size)
    return np.array([zlib.crc32(raw[i + 4 : i + size]) for i in starts], np.uint32)


def _whole_records(records: NDArray[Any], sound: NDArray[np.bool_]) -> int:
    """Return the number of intact records at the start; a text counts only if its last record is among them."""
    wrong = np.flatnonzero(~sound)
    whole = int(wrong[0]) if len(wrong) else len(records)
    while whole and records[whole - 1]["kind"] == _TEXT and not records[whole - 1]["payload"].tobytes().endswith(b"\n"):
        whole -= 1
    return whole


def _next_append(records: NDArray[Any]) -> int:
    """Return the number of the append that follows these records, or -1 if the first append is incomplete, which
    a kill cannot cause, because the first append is written atomically."""
    if not records["last"].any():
        return -1
    return (int(records["append"][-1]) + int(records["last"][-1])) % _APPENDS
