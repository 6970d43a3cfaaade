"""The state of a slice buffer, which follows from the records of its journal alone.

Processes that apply the same records have the same state, whether they read or write the records. A buffer has one
side, or two: one for the policy's episodes and one for human episodes.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from rollstream.consumers.buffers.slices.episode_cuts import EpisodePart
from rollstream.consumers.buffers.slices.episode_index import EpisodeIndex
from rollstream.consumers.buffers.storage.segments import Layout

Name = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
"""Beginning of the names of a buffer's files."""


class EpisodeSteps(msgspec.Struct, array_like=True, frozen=True):
    """The next `steps` steps of a side belong to an episode."""

    side: int
    episode: int
    steps: int
    uid: str = ""
    """Uid of an episode that is or was open; empty if the episode begins and ends here."""
    last: bool = True
    """Whether the episode ends. If so, no episode stays open under its uid; if not, this episode is open."""
    begin: int = 0
    """Number of steps of the episode before these, needed if the episode is new; 0 if it is unknown."""


class AddRecord(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    """Steps were written at the heads of the sides, and the position of a partition moved with them."""

    runs: tuple[EpisodeSteps, ...]
    at: tuple[int, int] | None
    """Partition and offset of the record that the steps came from."""
    draws: tuple[int, ...]
    arrays: Layout
    """The arrays of every step, if these are the first steps."""


class DropRecord(msgspec.Struct, array_like=True, frozen=True, tag="d"):
    """The segments with the steps of a side before `below` are about to be deleted; it is on disk before that."""

    side: int
    below: int


class FlushRecord(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """All earlier records and steps are on disk."""

    draws: tuple[int, ...]


class OpenRecord(msgspec.Struct, array_like=True, frozen=True, tag="o"):
    """A writer opened the journal during this boot of the machine."""

    boot: str


class SideSnapshot(msgspec.Struct, array_like=True, frozen=True):
    """The whole state of one side."""

    columns: Mapping[str, bytes]
    """Columns of the episode index; int64, little-endian."""
    open: Mapping[str, int]
    head: int
    low: int
    following: int
    draws: int


class SnapshotRecord(msgspec.Struct, array_like=True, frozen=True, tag="w"):
    """The whole state, which replaces all earlier records; it is on disk."""

    name: Name
    capacity: int
    arrays: Layout
    position: Mapping[int, int]
    sides: tuple[SideSnapshot, ...]


Record = AddRecord | DropRecord | FlushRecord | OpenRecord | SnapshotRecord
DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class SliceSide:
    """The episodes of one side, open episodes by uid, the counter of the next step, and the number of draws."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.index = EpisodeIndex()
        self.head = 0
        """Counter of the next step: the number of steps written so far."""
        self.low = 0
        """Steps below this counter are forgotten."""
        self.draws = 0
        self.open: dict[str, int] = {}
        """Numbers of open episodes by uid."""
        self._uids: dict[int, str] = {}
        self._following = 0

    def runs(self, number: int, parts: Sequence[EpisodePart]) -> list[EpisodeSteps]:
        """Assign parts, in order, to episodes; `number` is the number of this side."""
        held: dict[str, tuple[int, int] | None] = {}
        """Number and next step of the episodes that the parts so far left open, by uid; None if they ended it."""
        following, runs = self._following, []
        for part in parts:
            before = held[part.uid] if part.uid in held else self._open_episode(part.uid)
            if before is not None and _continues(part, before[1]):
                episode, begin = before
            else:
                episode, begin, following = following, max(part.begin, 0), following + 1
            known = not part.last or not part.first or part.uid in self.open or held.get(part.uid) is not None
            held[part.uid] = None if part.last else (episode, begin + part.steps)
            runs.append(EpisodeSteps(number, episode, part.steps, part.uid if known else "", part.last, begin))
        return runs

    def extend(self, run: EpisodeSteps) -> None:
        """Append steps, and forget the oldest ones beyond the capacity."""
        self.index.extend(run.episode, self.head, run.steps, run.begin)
        self.head += run.steps
        self._following = max(self._following, run.episode + 1)
        if run.uid:
            self._uids.pop(self.open.pop(run.uid, -1), None)
            if not run.last:
                self.open[run.uid], self._uids[run.episode] = run.episode, run.uid
        self.forget(self.head - self._capacity)

    def forget(self, below: int) -> None:
        """Forget the steps below this counter."""
        if below > self.low:
            self.low = below
            for episode in self.index.evict(below):
                self.open.pop(self._uids.pop(episode, ""), None)
            # The next step is not below the steps to forget, or it would count as forgotten.
            self.head = max(self.head, below)

    def snapshot(self) -> SideSnapshot:
        """Return the whole state."""
        columns = {name: column.astype("<i8").tobytes() for name, column in self.index.columns().items()}
        return SideSnapshot(columns, dict(self.open), self.head, self.low, self._following, self.draws)

    @classmethod
    def of(cls, snapshot: SideSnapshot, capacity: int) -> "SliceSide":
        """Restore a state. Raises KeyError or ValueError if the columns are not a valid episode index."""
        side = cls(capacity)
        side.index = EpisodeIndex.of({name: np.frombuffer(data, "<i8") for name, data in snapshot.columns.items()})
        side.head, side.low, side._following = snapshot.head, snapshot.low, snapshot.following
        side.open, side.draws = dict(snapshot.open), snapshot.draws
        side._uids = {episode: uid for uid, episode in side.open.items()}
        return side

    def _open_episode(self, uid: str) -> tuple[int, int] | None:
        """Number and next step of the open episode of a uid."""
        episode = self.open.get(uid)
        return None if episode is None else (episode, self.index.end_of(episode))


class SliceState:
    """The sides, the arrays of every step, and the position."""

    def __init__(self, capacity: int, sides: int = 1, name: str = "") -> None:
        self.name, self.capacity = name, capacity
        self.arrays: Layout = ()
        """Empty before the first step."""
        self.position: dict[int, int] = {}
        self.sides = [SliceSide(capacity) for _ in range(sides)]

    def apply(self, record: Record) -> None:
        """Apply one record. Raises KeyError or ValueError if it is a snapshot with an invalid index."""
        match record:
            case AddRecord():
                self.arrays = record.arrays or self.arrays
                for run in record.runs:
                    self.sides[run.side].extend(run)
                if record.at is not None:
                    partition, offset = record.at
                    self.position[partition] = offset + 1
                self._draw(record.draws)
            case DropRecord():
                self.sides[record.side].forget(record.below)
            case FlushRecord():
                self._draw(record.draws)
            case SnapshotRecord():
                self.name, self.capacity, self.arrays = record.name, record.capacity, record.arrays
                self.position = dict(record.position)
                self.sides = [SliceSide.of(side, record.capacity) for side in record.sides]
            case _:
                pass

    def add_record(
        self, parts: Sequence[Sequence[EpisodePart]], at: tuple[int, int] | None, arrays: Layout
    ) -> AddRecord:
        """Return the record that assigns the parts of each side, in order, to episodes."""
        runs = [run for n, (side, own) in enumerate(zip(self.sides, parts, strict=True)) for run in side.runs(n, own)]
        return AddRecord(tuple(runs), at, self.draws, arrays)

    def snapshot(self, name: str = "") -> SnapshotRecord:
        """Return the whole state as one record, for files of another `name` if given."""
        sides = tuple(side.snapshot() for side in self.sides)
        return SnapshotRecord(name or self.name, self.capacity, self.arrays, dict(self.position), sides)

    @property
    def draws(self) -> tuple[int, ...]:
        """Number of draws from each side."""
        return tuple(side.draws for side in self.sides)

    def _draw(self, draws: Sequence[int]) -> None:
        for side, count in zip(self.sides, draws, strict=True):
            side.draws = max(side.draws, count)


def _continues(part: EpisodePart, step: int) -> bool:
    """Whether a part continues an open episode whose next step is `step`: no trajectory between them is missing."""
    return bool(part.uid) and not part.first and part.begin in (-1, step)
