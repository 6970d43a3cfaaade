"""What a directory of trajectories holds, as an append-only file of records of 56 bytes, each with its checksum.

An entry carries the position of the log it brings with it: content and position are one fact. What a killed writer left
torn is cut off, and that can only be the last append; damage before it is refused. A clean close appends a record of
its own, so that nothing before that record passes for torn.
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

from consumers.buffers.files import StoreError, sync_directory, write_bytes
from consumers.buffers.trajectory_index import About, Entry, TrajectoryIndex
from consumers.buffers.trajectory_rows import Layout, Leaf

NAME = "trajectory_index.log"
_HEADER, _TEXT, _ENTRY, _DROP, _POSITION, _STATE, _CLOSED = range(1, 8)
_MAGIC = b"rollstream trajectories, version 1".ljust(48)
_HEAD = [("crc", "<u4"), ("kind", "u1"), ("last", "u1"), ("append", "<u2")]
"""`append` counts what was handed over at once, and `last` is 1 for the end of it: each is on disk before the next."""
_APPENDS = 2**16
_RAW = np.dtype([*_HEAD, ("payload", "V48")])
ENTRY = np.dtype(
    [
        *_HEAD,
        ("id", "<i8"),
        ("uuid", "V16"),
        ("about", "<u4"),
        ("partition", "<i4"),
        ("offset", "<i8"),
        ("size_bytes", "<i8"),
    ]
)
"""One trajectory; partition -1 where it did not come from the log, else `offset` is the next one.

Other kinds use the same fields: a drop has the first id that stays, a position its partition and offset, a state the
next id, seed and draws.
"""


@dataclasses.dataclass(kw_only=True)
class Content:
    """What a journal says."""

    entries: NDArray[Any] = dataclasses.field(default_factory=lambda: np.empty(0, ENTRY))
    """Of dtype ENTRY, ids ascending; `about` counts in `abouts`."""
    abouts: list[About] = dataclasses.field(default_factory=list)
    layout: Layout = ()
    position: dict[int, int] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    draws: int = 0
    counter: int = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> Entry:
        of = self.entries[place]
        return Entry(int(of["id"]), of["uuid"].tobytes(), self.abouts[of["about"]], int(of["size_bytes"]))

    @classmethod
    def of(cls, index: TrajectoryIndex, layout: Layout) -> "Content":
        """What an index holds."""
        ids, uuids, abouts, sizes, known = index.columns()
        entries = np.zeros(len(ids), ENTRY)
        entries["id"], entries["uuid"], entries["about"], entries["size_bytes"] = ids, uuids, abouts, sizes
        entries["partition"] = -1
        return cls(entries=entries, abouts=list(known), layout=layout, counter=index.counter)

    def part(self, begin: int, end: int) -> "Content":
        """The same with some of the trajectories: those from place `begin` to before `end`."""
        return dataclasses.replace(self, entries=self.entries[begin:end])


class Decoded(NamedTuple):
    """What was read of a journal."""

    content: Content
    size_bytes: int
    """How much of it is whole."""
    appends: int
    """The number of the next append."""
    closed: bool
    """Whether its writer closed it, and nothing came after."""


class Encoder:
    """Records to be appended, in their order; it knows which texts the file has already."""

    def __init__(self, abouts: Iterable[About] = (), layout: Layout = ()) -> None:
        self._numbers = {about: number for number, about in enumerate(abouts)}
        self._layout = layout

    def copy(self) -> "Encoder":
        """One that knows the same: for records that may not come to be on disk."""
        return Encoder(self._numbers, self._layout)

    def entry(
        self, trajectory_id: int, uuid: bytes, about: About, size_bytes: int, at: tuple[int, int] | None, layout: Layout
    ) -> bytes:
        """A trajectory, with the position behind it where it came from the log."""
        texts = b""
        if layout != self._layout:
            self._layout = layout
            texts += _text({"layout": layout})
        if about not in self._numbers:
            self._numbers[about] = len(self._numbers)
            texts += _text({"about": about})
        partition, offset = at or (-1, 0)
        return texts + _record(
            _ENTRY, trajectory_id, uuid, self._numbers[about], partition=partition, offset=offset, size_bytes=size_bytes
        )

    @staticmethod
    def drop(first_kept: int) -> bytes:
        """Everything of a lower id has left."""
        return _record(_DROP, first_kept)

    @staticmethod
    def position(partition: int, offset: int) -> bytes:
        """Everything before this offset is dealt with."""
        return _record(_POSITION, partition=partition, offset=offset)

    @staticmethod
    def state(counter: int, seed: int, draws: int) -> bytes:
        """The next id, and where the random draws stand."""
        return _record(_STATE, counter, (seed % 2**128).to_bytes(16, "little"), offset=draws)


def encode(content: Content) -> bytes:
    """A journal that says this, and nothing else."""
    used, numbers = np.unique(content.entries["about"], return_inverse=True)
    entries = content.entries.copy()
    entries["about"], entries["kind"] = numbers, _ENTRY
    texts = [_text({"layout": content.layout})] if content.layout else []
    texts += [_text({"about": content.abouts[number]}) for number in used]
    positions = [Encoder.position(partition, offset) for partition, offset in content.position.items()]
    state = Encoder.state(content.counter, content.seed or 0, content.draws)
    return stamped(b"".join([_raw(_HEADER, _MAGIC), *texts, entries.tobytes(), *positions, state]), 0)


def stamped(records: bytes, append: int) -> bytes:
    """Records that are handed over at once, with the number of that and their checksums."""
    found = np.frombuffer(records, _RAW).copy()
    found["append"], found["last"][-1:] = append % _APPENDS, 1
    found["crc"] = _checksums(found.tobytes())
    return found.tobytes()


def decode(data: bytes, where: Path) -> Decoded:
    """What a journal says. Raises StoreError where more than its last append is damaged."""
    records = np.frombuffer(data, _RAW, len(data) // _RAW.itemsize)
    sound = records["crc"] == _checksums(data)
    whole = _whole(records, sound)
    appends = _next_append(records[:whole])
    # What was begun after the damage was begun when all before it was on disk.
    others = records["append"][whole:][sound[whole:]] != appends
    if appends < 0 or records[0]["payload"].tobytes() != _MAGIC or others.any():
        raise StoreError(
            f"{where} is damaged at byte {whole * _RAW.itemsize} of {len(data)}, or not of this program; nothing was "
            "changed: restore it, or fill a new directory from the log"
        )
    records = records[:whole]
    kinds = records["kind"]
    abouts, layout = _said(records["payload"][kinds == _TEXT].tobytes())
    fields = np.frombuffer(data, ENTRY, whole)
    entries = fields[kinds == _ENTRY]
    counter = int(entries["id"][-1]) + 1 if len(entries) else 0
    first_kept = int(fields["id"][kinds == _DROP].max(initial=0))
    states = fields[kinds == _STATE]
    content = Content(
        entries=entries[entries["id"] >= first_kept],
        abouts=abouts,
        layout=layout,
        position=_positions(fields[((kinds == _ENTRY) & (fields["partition"] >= 0)) | (kinds == _POSITION)]),
        counter=max(counter, first_kept),
    )
    if len(states):
        content.seed = int.from_bytes(states[-1]["uuid"].tobytes(), "little")
        content.draws = int(states[-1]["offset"])
        content.counter = max(content.counter, int(states[-1]["id"]))
    return Decoded(content, whole * _RAW.itemsize, appends, bool(kinds[-1] == _CLOSED))


class Journal:
    """The file of one directory, for its only writer."""

    def __init__(self, directory: Path, seed: int) -> None:
        """Open it, or make it. Raises StoreError for one that is damaged, or cannot be written."""
        self.path = directory / NAME
        self.content = Content()
        """What it said when it was opened or replaced."""
        self._size = self._appends = 0
        self._closed = False
        self._descriptor = -1
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            self.replace(Content(seed=seed))
            return
        self._open(data)

    def append(self, records: bytes) -> None:
        """Have records on disk. Raises StoreError; then none of them is there for a reader, and they may come again."""
        records = stamped(records, self._appends)
        try:
            # At the place where the last whole record ends: what a failed attempt wrote is overwritten.
            written = os.pwrite(self._descriptor, records, self._size)
            if written != len(records):
                raise OSError(f"{written} of {len(records)} bytes written")
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # or it is overwritten
                os.ftruncate(self._descriptor, self._size)
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror or error}); look at the space and the rights there, "
                "then write again"
            ) from error
        self._size += len(records)
        self._appends = (self._appends + 1) % _APPENDS
        self._closed = False

    @property
    def records(self) -> int:
        """How many records the file has."""
        return self._size // _RAW.itemsize

    def encoder(self) -> Encoder:
        """For what is to be appended to a journal that says `content`, and nothing else yet."""
        return Encoder(self.content.abouts, self.content.layout)

    def read(self) -> Content:
        """What it says now."""
        return decode(self.path.read_bytes()[: self._size], self.path).content

    def replace(self, content: Content) -> None:
        """Have it say this instead, atomically. Raises StoreError."""
        data = encode(content)
        write_bytes(self.path, data)
        # As it was written: what nothing refers to any more is not in it, and the rest counts anew.
        self._open(data)

    def seal(self) -> None:
        """Say that the writer ends here, after which nothing passes for torn. Raises StoreError."""
        if not self._closed:
            self.append(_record(_CLOSED))
            self._closed = True

    def close(self) -> None:
        """Give the file back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, data: bytes) -> None:
        """Go on behind what is whole of it."""
        self.content, self._size, self._appends, self._closed = decode(data, self.path)
        self.close()
        self._descriptor = os.open(self.path, os.O_RDWR)
        os.ftruncate(self._descriptor, self._size)
        sync_directory(self.path.parent)


def read_content(directory: Path) -> Content:
    """What the journal of a directory says. Raises FileNotFoundError, and StoreError where it is damaged."""
    path = directory / NAME
    return decode(path.read_bytes(), path).content


def write_content(directory: Path, content: Content) -> None:
    """Have the journal of a directory say this, atomically. Raises StoreError."""
    write_bytes(directory / NAME, encode(content))


def _record(
    kind: int,
    trajectory_id: int = 0,
    uuid: bytes = b"",
    about: int = 0,
    *,
    partition: int = -1,
    offset: int = 0,
    size_bytes: int = 0,
) -> bytes:
    fields = np.zeros(1, ENTRY)
    fields[0] = (0, kind, 0, 0, trajectory_id, uuid.ljust(16, b"\0"), about, partition, offset, size_bytes)
    return fields.tobytes()


def _raw(kind: int, payload: bytes) -> bytes:
    return bytes(4) + kind.to_bytes(4, "little") + payload


def _text(value: Mapping[str, Any]) -> bytes:
    """A JSON document over as many records as it takes; a line end says where it is over."""
    line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    line = line.ljust(-(-len(line) // 48) * 48, b"\n")
    return b"".join(_raw(_TEXT, line[i : i + 48]) for i in range(0, len(line), 48))


def _said(texts: bytes) -> tuple[list[About], Layout]:
    abouts: list[About] = []
    layout: Layout = ()
    for line in texts.split(b"\n"):
        if line:
            said = json.loads(line)
            if "about" in said:
                abouts.append(About(*said["about"]))
            else:
                layout = tuple(Leaf(path, dtype, tuple(shape)) for path, dtype, shape in said["layout"])
    return abouts, layout


def _positions(records: NDArray[Any]) -> dict[int, int]:
    """The last offset of each partition."""
    partitions, last = np.unique(records["partition"][::-1], return_index=True)
    offsets = records["offset"][::-1][last]
    return {int(partition): int(offset) for partition, offset in zip(partitions, offsets, strict=True)}


def _checksums(records: bytes) -> NDArray[np.uint32]:
    """Of each whole record: all of it but the four bytes its checksum has."""
    raw, size = memoryview(records), _RAW.itemsize
    starts = range(0, len(raw) // size * size, size)
    return np.array([zlib.crc32(raw[i + 4 : i + size]) for i in starts], np.uint32)


def _whole(records: NDArray[Any], sound: NDArray[np.bool_]) -> int:
    """How many records from the first on are whole; a text is, when its last record is there."""
    wrong = np.flatnonzero(~sound)
    whole = int(wrong[0]) if len(wrong) else len(records)
    while whole and records[whole - 1]["kind"] == _TEXT and not records[whole - 1]["payload"].tobytes().endswith(b"\n"):
        whole -= 1
    return whole


def _next_append(records: NDArray[Any]) -> int:
    """The number of the append that goes on after these records; -1 where the first, which comes whole, is not."""
    if not records["last"].any():
        return -1
    return (int(records["append"][-1]) + int(records["last"][-1])) % _APPENDS
