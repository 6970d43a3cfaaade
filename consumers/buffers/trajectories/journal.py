"""The content of a directory of trajectories, in a journal: which trajectories there are, position and random state.

An addition contains its position in the log, so content and position change together.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.storage.journal import (
    Journal,
    JournalReading,
    NoJournal,
    read_journal,
    write_journal,
)
from rollstream.consumers.buffers.storage.segments import Layout
from rollstream.consumers.buffers.trajectories.index import ROW, Description, TrajectoryEntry, TrajectoryIndex
from rollstream.topics.files.atomic_files import StoreError, sync_directory

NAME = "trajectory_index.log"


class AddRecord(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    """A trajectory was added."""

    entry: TrajectoryEntry
    at: tuple[int, int] | None
    """Partition, and the offset after its record in the log."""


class LayoutRecord(msgspec.Struct, array_like=True, frozen=True, tag="l"):
    """The arrays that all trajectories have now."""

    layout: Layout


class DropRecord(msgspec.Struct, array_like=True, frozen=True, tag="d"):
    """All trajectories with a lower id were removed."""

    first_kept: int


class PositionRecord(msgspec.Struct, array_like=True, frozen=True, tag="p"):
    """Every record of a partition before this offset was added or skipped."""

    partition: int
    offset: int


class DrawRecord(msgspec.Struct, array_like=True, frozen=True, tag="r"):
    """The next id, the seed as decimal digits, and the number of draws."""

    counter: int
    seed: str
    draws: int


class SnapshotRecord(msgspec.Struct, array_like=True, frozen=True, tag="w"):
    """The whole content, which replaces all earlier records."""

    entries: bytes
    descriptions: list[Description]
    layout: Layout
    position: dict[int, int]
    drawn: DrawRecord


Record = AddRecord | LayoutRecord | DropRecord | PositionRecord | DrawRecord | SnapshotRecord
_DECODER: msgspec.msgpack.Decoder[list[Record]] = msgspec.msgpack.Decoder(list[Record])
"""One append is a list of records, so that it is on disk as a whole or not at all."""


@dataclasses.dataclass(kw_only=True)
class JournalContent:
    """The content of a journal: trajectories, position and random state."""

    entries: NDArray[Any] = dataclasses.field(default_factory=lambda: np.empty(0, ROW))
    """Rows of dtype ROW, ids ascending; `description` is an index into `descriptions`."""
    descriptions: list[Description] = dataclasses.field(default_factory=list)
    layout: Layout = ()
    position: dict[int, int] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    draws: int = 0
    counter: int = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> TrajectoryEntry:
        trajectory_id, uuid_bytes, description, size_bytes = self.entries[place].item()
        return TrajectoryEntry(trajectory_id, uuid_bytes, self.descriptions[description], size_bytes)

    @classmethod
    def of(cls, index: TrajectoryIndex, layout: Layout) -> "JournalContent":
        """Return the content of an index."""
        descriptions = list(index.descriptions)
        return cls(entries=index.rows.copy(), descriptions=descriptions, layout=layout, counter=index.counter)

    def part(self, begin: int, end: int) -> "JournalContent":
        """Return the same content with only the trajectories from place `begin` to before `end`."""
        return dataclasses.replace(self, entries=self.entries[begin:end])

    def snapshot(self) -> SnapshotRecord:
        """Return the whole content as one record."""
        used, numbers = np.unique(self.entries["description"], return_inverse=True)
        # Descriptions that differed only in their folder are equal once the files are in one folder.
        distinct = list(dict.fromkeys(self.descriptions[number] for number in used))
        places = {description: place for place, description in enumerate(distinct)}
        entries = self.entries.copy()
        entries["description"] = np.array([places[self.descriptions[n]] for n in used], np.uint32)[numbers]
        drawn = DrawRecord(self.counter, str(self.seed or 0), self.draws)
        return SnapshotRecord(entries.tobytes(), distinct, self.layout, self.position, drawn)


class TrajectoryJournal:
    """The journal file of one directory, for its only writer."""

    def __init__(self, directory: Path, seed: int) -> None:
        """Open the file, or create it. Raises StoreError if it is damaged or cannot be written."""
        self._path = directory / NAME
        try:
            reading = _read(self._path)
        except NoJournal:
            write_content(directory, JournalContent(seed=seed))
            reading = _read(self._path)
        self.content = _content_of(reading.records)
        """Content at the time when the journal was opened or replaced."""
        self._layout = self.content.layout
        self._closed = reading.closed
        self._journal = Journal(self._path, reading.stop)
        sync_directory(directory)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._journal.size_bytes

    def append(self, records: list[Record], layout: Layout | None) -> None:
        """Write records to disk, with the layout of the last trajectory that they add. Raises StoreError; readers then
        see none of them, and a retry is safe."""
        layout = self._layout if layout is None else layout
        if layout != self._layout:
            records = [*records, LayoutRecord(layout)]
        self._journal.append(records, sync=True)
        self._layout, self._closed = layout, False

    def shorten(self) -> None:
        """Replace a long journal by its content. Raises StoreError."""
        if self._journal.long:
            self.replace(_content_of(_read(self._path).records))

    def replace(self, content: JournalContent) -> None:
        """Replace the content atomically. Raises StoreError."""
        snapshot = content.snapshot()
        self._layout = ()  # Written again with the next trajectory, because the file may be replaced despite an error.
        self._closed = False
        self._journal.replace([snapshot])
        self.content = _content_of([[snapshot]])

    def close(self) -> None:
        """Mark a clean close, before which damage is always an error, and close the file. Raises StoreError."""
        if not self._closed:
            self._journal.append_closed()
            self._closed = True
        self._journal.close()


def read_content(directory: Path) -> JournalContent:
    """Read the journal of a directory. Raises NoJournal (also a FileNotFoundError), or StoreError if it is damaged."""
    return _content_of(_read(directory / NAME).records)


def write_content(directory: Path, content: JournalContent) -> None:
    """Replace the journal of a directory atomically. Raises StoreError."""
    write_journal(directory / NAME, [content.snapshot()])


def _read(path: Path) -> JournalReading[list[Record]]:
    reading = read_journal(path, _DECODER)
    if reading.damaged or not reading.records:
        raise StoreError(
            f"{path} is damaged at byte {reading.stop}, or was not written by this program; nothing was changed: "
            "restore it, or fill a new directory from the log"
        )
    return reading


def _content_of(appends: Sequence[Sequence[Record]]) -> JournalContent:
    """Return the content after these appends, the first of which is a snapshot."""
    content, first_kept = JournalContent(), 0
    numbers: dict[Description, int] = {}
    added: list[tuple[Any, ...]] = []
    for append in appends:
        for record in append:
            match record:
                case AddRecord():
                    trajectory_id, uuid_bytes, description, size_bytes = record.entry
                    number = numbers.setdefault(description, len(numbers))
                    added.append((trajectory_id, uuid_bytes, number, size_bytes))
                    content.counter = trajectory_id + 1
                    if record.at is not None:
                        content.position[record.at[0]] = record.at[1]
                case LayoutRecord():
                    content.layout = record.layout
                case DropRecord():
                    first_kept = record.first_kept
                case PositionRecord():
                    content.position[record.partition] = record.offset
                case DrawRecord():
                    content.counter, content.seed, content.draws = record.counter, int(record.seed), record.draws
                case SnapshotRecord():
                    drawn = record.drawn
                    content = JournalContent(
                        entries=np.frombuffer(record.entries, ROW),
                        layout=record.layout,
                        position=record.position,
                        seed=int(drawn.seed),
                        draws=drawn.draws,
                        counter=drawn.counter,
                    )
                    numbers = {description: place for place, description in enumerate(record.descriptions)}
    entries = np.concatenate([content.entries, np.array(added, ROW)])
    content.entries = entries[entries["id"] >= first_kept]
    content.descriptions = list(numbers)
    return content
