"""Which trajectories a buffer holds, oldest first, in columns: tens of bytes each, however many there are.

Trajectories leave at the old end only. A window is a view: the running totals that draws are mapped by are there.
"""

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from topics.records import Int64


class About(NamedTuple):
    """What many trajectories have in common; kept once."""

    steps: int
    width: int
    max_episode_length: int
    model_weights_id: str
    environment: str
    format: str
    """Of its file; "" in memory."""
    folder: str = ""
    """Below the buffer's directory."""

    @property
    def samples(self) -> int:
        """T * B."""
        return self.steps * self.width


class Entry(NamedTuple):
    """One trajectory of the index."""

    trajectory_id: int
    uuid: bytes
    """16 bytes: its uid where that is a uuid, else one made of it."""
    about: About
    size_bytes: int
    """Of its arrays."""


class Window(NamedTuple):
    """The newest trajectories of an index; `ends` is of this moment, and a copy is needed to keep it."""

    first: int
    """Place in the index of the first."""
    ends: Int64
    """Running total of samples after each."""
    base: int
    """Running total before the first."""

    @property
    def samples(self) -> int:
        """How many there are to draw from."""
        return int(self.ends[-1]) - self.base if len(self.ends) else 0


_ROW = np.dtype([("id", "<i8"), ("uuid", "V16"), ("about", "<u4"), ("size_bytes", "<i8")])


class Queue:
    """Numbers, or rows of them, that come at one end and leave at the other, as one contiguous array."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._data: NDArray[Any] = np.empty(16, dtype)
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def all(self) -> NDArray[Any]:
        """A view, valid until the next change."""
        return self._data[self._begin : self._end]

    def append(self, value: Any) -> None:
        self._room(1)
        self._data[self._end] = value
        self._end += 1

    def extend(self, values: NDArray[Any]) -> None:
        self._room(len(values))
        self._data[self._end : self._end + len(values)] = values
        self._end += len(values)

    def drop(self, count: int) -> None:
        """Take the oldest off."""
        self._begin += count

    @property
    def nbytes(self) -> int:
        """Bytes of memory, room to grow included."""
        return self._data.nbytes

    def _room(self, count: int) -> None:
        if self._end + count <= len(self._data):
            return
        held = self.all
        data = np.empty(max(16, len(held) * 3 // 2 + count), self._data.dtype)
        data[: len(held)] = held
        self._data, self._begin, self._end = data, 0, len(held)


class TrajectoryIndex:
    """Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._rows, self._ends = Queue(_ROW), Queue(np.dtype("<i8"))
        self._known: list[About] = []
        self._numbers: dict[About, int] = {}
        self._base = 0
        self.size_bytes = 0
        """Bytes of the arrays of all that are held."""
        self.counter = 0
        """The next id."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Entry:
        trajectory_id, uuid_bytes, about, size_bytes = self._rows.all[place].item()
        return Entry(trajectory_id, uuid_bytes, self._known[about], size_bytes)

    @property
    def ids(self) -> Int64:
        """Ids, oldest first; a view."""
        ids: Int64 = self._rows.all["id"]
        return ids

    @property
    def samples(self) -> int:
        """Samples of all that are held."""
        return int(self._ends.all[-1]) - self._base if len(self) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the columns."""
        return self._rows.nbytes + self._ends.nbytes

    def append(self, uuid_bytes: bytes, about: About, size_bytes: int) -> Entry:
        """Add one under the next id."""
        entry = Entry(self.counter, uuid_bytes, about, size_bytes)
        self._ends.append((self._ends.all[-1] if len(self) else self._base) + about.samples)
        self._rows.append((entry.trajectory_id, uuid_bytes, self._number(about), size_bytes))
        self.size_bytes += size_bytes
        self.counter += 1
        return entry

    def extend(
        self,
        ids: Int64,
        uuids: NDArray[np.void],
        of: NDArray[np.uint32],
        sizes: Int64,
        abouts: Sequence[About],
    ) -> None:
        """Add many at once, whose ids ascend; number `of[i]` of `abouts` is about the i-th."""
        if not len(ids):
            return
        numbers = np.array([self._number(about) for about in abouts], np.uint32)
        samples = np.array([about.samples for about in abouts], np.int64)
        self._ends.extend((self._ends.all[-1] if len(self) else self._base) + np.cumsum(samples[of]))
        rows = np.empty(len(ids), _ROW)
        rows["id"], rows["uuid"], rows["about"], rows["size_bytes"] = ids, uuids, numbers[of], sizes
        self._rows.extend(rows)
        self.size_bytes += int(sizes.sum())
        self.counter = max(self.counter, int(ids[-1]) + 1)

    def columns(self) -> tuple[Int64, NDArray[np.void], NDArray[np.uint32], Int64, list[About]]:
        """Ids, uuids, which about, sizes, and the abouts: views of what `extend` takes."""
        rows = self._rows.all
        return rows["id"], rows["uuid"], rows["about"], rows["size_bytes"], self._known

    def drop(self, count: int) -> list[Entry]:
        """Take the `count` oldest out, and return them."""
        if not count:
            return []
        gone = [self[place] for place in range(count)]
        self._base = int(self._ends.all[count - 1])
        self._rows.drop(count)
        self._ends.drop(count)
        self.size_bytes -= sum(entry.size_bytes for entry in gone)
        if len(self._known) > 64 + 2 * len(self):
            self._forget()
        return gone

    def over(self, max_trajectories: int, max_bytes: int) -> int:
        """How many of the oldest have to leave for the others to be within the bounds; 0 is no bound."""
        count = max(0, len(self) - max_trajectories) if max_trajectories else 0
        if max_bytes:
            sizes = self._rows.all["size_bytes"]
            left = self.size_bytes - int(sizes[:count].sum())
            while left > max_bytes:
                left -= int(sizes[count])
                count += 1
        return count

    def window(self, size: int) -> Window:
        """The newest `size`; 0 is all."""
        first = max(0, len(self) - size) if size else 0
        ends = self._ends.all
        return Window(first, ends[first:], int(ends[first - 1]) if first else self._base)

    def _number(self, about: About) -> int:
        number = self._numbers.setdefault(about, len(self._known))
        if number == len(self._known):
            self._known.append(about)
        return number

    def _forget(self) -> None:
        """Keep only what is known about those that are held."""
        used, numbers = np.unique(self._rows.all["about"], return_inverse=True)
        self._known = [self._known[number] for number in used]
        self._numbers = {about: number for number, about in enumerate(self._known)}
        self._rows.all["about"] = numbers


def uuid_of(uid: str) -> bytes:
    """16 bytes that identify a uid: those it names, or those of a uuid made of it (RFC 9562, version 5)."""
    try:
        # As ours are written: read in a tenth of the time it takes to make a UUID of it.
        plain = bytes.fromhex(uid) if len(uid) == 32 else b""
        return plain if len(plain) == 16 else uuid.UUID(uid).bytes
    except ValueError:
        return uuid.uuid5(uuid.NAMESPACE_URL, uid).bytes
