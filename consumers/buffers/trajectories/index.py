"""Index of the trajectories of a buffer, oldest first, in columns: tens of bytes for each trajectory.

Only the oldest trajectories are removed. A window is a view of the running totals, which map draws to trajectories.
"""

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.records import Int64


class Description(NamedTuple):
    """Properties that many trajectories share; each combination is stored once."""

    steps: int
    width: int
    max_episode_length: int
    model_weights_id: str
    environment: str
    format: str
    """Format of the file; "" in memory."""
    folder: str = ""
    """Folder of the file below the buffer's directory; "" for the directory itself."""

    @property
    def samples(self) -> int:
        """Number of samples, T * B."""
        return self.steps * self.width


class TrajectoryEntry(NamedTuple):
    """One trajectory of the index."""

    trajectory_id: int
    uuid: bytes
    """16 bytes: the uid if it is a UUID, else a UUID derived from the uid."""
    description: Description
    size_bytes: int
    """Size of the arrays."""


class Window(NamedTuple):
    """The newest trajectories of an index. `ends` is a view, valid until the next change; copy it to keep it."""

    first: int
    """Place of the first trajectory in the index."""
    ends: Int64
    """Running total of samples after each trajectory."""
    base: int
    """Running total before the first trajectory."""

    @property
    def samples(self) -> int:
        """Number of samples in the window."""
        return int(self.ends[-1]) - self.base if len(self.ends) else 0


ROW = np.dtype([("id", "<i8"), ("uuid", "V16"), ("description", "<u4"), ("size_bytes", "<i8")])
"""One trajectory; `description` is a number of a description."""


class ColumnQueue:
    """A queue of numbers, or of rows of numbers, kept as one contiguous array."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._data: NDArray[Any] = np.empty(16, dtype)
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def all(self) -> NDArray[Any]:
        """The values, as a view that is valid until the next change."""
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
        """Remove the `count` oldest values."""
        self._begin += count

    @property
    def nbytes(self) -> int:
        """Bytes of memory, including room to grow."""
        return self._data.nbytes

    def _room(self, count: int) -> None:
        if self._end + count <= len(self._data):
            return
        held = self.all
        data = np.empty(max(16, len(held) * 3 // 2 + count), self._data.dtype)
        data[: len(held)] = held
        self._data, self._begin, self._end = data, 0, len(held)


class TrajectoryIndex:
    """Entries of trajectories by place. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._rows, self._ends = ColumnQueue(ROW), ColumnQueue(np.dtype("<i8"))
        self._known: list[Description] = []
        self._numbers: dict[Description, int] = {}
        self._base = 0
        self.size_bytes = 0
        """Bytes of the arrays of all trajectories."""
        self.counter = 0
        """The id of the next trajectory."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> TrajectoryEntry:
        trajectory_id, uuid_bytes, description, size_bytes = self._rows.all[place].item()
        return TrajectoryEntry(trajectory_id, uuid_bytes, self._known[description], size_bytes)

    @property
    def ids(self) -> Int64:
        """Ids, oldest first; a view."""
        ids: Int64 = self._rows.all["id"]
        return ids

    @property
    def samples(self) -> int:
        """Number of samples of all trajectories."""
        return int(self._ends.all[-1]) - self._base if len(self) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns use."""
        return self._rows.nbytes + self._ends.nbytes

    def append(self, uuid_bytes: bytes, description: Description, size_bytes: int) -> TrajectoryEntry:
        """Add a trajectory under the next id."""
        entry = TrajectoryEntry(self.counter, uuid_bytes, description, size_bytes)
        self._ends.append((self._ends.all[-1] if len(self) else self._base) + description.samples)
        self._rows.append((entry.trajectory_id, uuid_bytes, self._number(description), size_bytes))
        self.size_bytes += size_bytes
        self.counter += 1
        return entry

    def extend(self, rows: NDArray[Any], descriptions: Sequence[Description]) -> None:
        """Add many trajectories whose ids ascend: rows of dtype ROW, `description` being a place in `descriptions`."""
        if not len(rows):
            return
        own_numbers = np.array([self._number(description) for description in descriptions], np.uint32)
        samples = np.array([description.samples for description in descriptions], np.int64)
        numbers = rows["description"]
        self._ends.extend((self._ends.all[-1] if len(self) else self._base) + np.cumsum(samples[numbers]))
        rows = rows.copy()
        rows["description"] = own_numbers[numbers]
        self._rows.extend(rows)
        self.size_bytes += int(rows["size_bytes"].sum())
        self.counter = max(self.counter, int(rows["id"][-1]) + 1)

    @property
    def rows(self) -> NDArray[Any]:
        """All trajectories, oldest first, as `extend` takes them; a view."""
        return self._rows.all

    @property
    def descriptions(self) -> Sequence[Description]:
        """The descriptions that `rows` refer to."""
        return self._known

    def drop(self, count: int) -> list[TrajectoryEntry]:
        """Remove and return the `count` oldest trajectories."""
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
        """Return how many of the oldest trajectories exceed the bounds; a bound of 0 is no bound."""
        count = max(0, len(self) - max_trajectories) if max_trajectories else 0
        if max_bytes:
            sizes = self._rows.all["size_bytes"]
            left = self.size_bytes - int(sizes[:count].sum())
            while left > max_bytes:
                left -= int(sizes[count])
                count += 1
        return count

    def window(self, size: int) -> Window:
        """Return the window of the newest `size` trajectories; 0 is all."""
        first = max(0, len(self) - size) if size else 0
        ends = self._ends.all
        return Window(first, ends[first:], int(ends[first - 1]) if first else self._base)

    def _number(self, description: Description) -> int:
        number = self._numbers.setdefault(description, len(self._known))
        if number == len(self._known):
            self._known.append(description)
        return number

    def _forget(self) -> None:
        """Forget descriptions that no trajectory uses any more."""
        used, numbers = np.unique(self._rows.all["description"], return_inverse=True)
        self._known = [self._known[number] for number in used]
        self._numbers = {description: number for number, description in enumerate(self._known)}
        self._rows.all["description"] = numbers


def uuid_of(uid: str) -> bytes:
    """Return 16 bytes that identify a uid: the uid if it is a UUID, else a version 5 UUID (RFC 9562) of it."""
    try:
        # Our own uids are 32 hexadecimal digits; this takes a tenth of the time of uuid.UUID.
        plain = bytes.fromhex(uid) if len(uid) == 32 else b""
        return plain if len(plain) == 16 else uuid.UUID(uid).bytes
    except ValueError:
        return uuid.uuid5(uuid.NAMESPACE_URL, uid).bytes
