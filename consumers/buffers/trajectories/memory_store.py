"""Trajectories in memory, for a buffer without auto_save: the parts that the cache does not have.

TrajectoryMemory takes the place of a TrajectoryStore, and has the methods that a buffer calls.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rollstream.consumers.buffers.storage.segments import layout_of
from rollstream.consumers.buffers.trajectories.folder import SavedCheckpoint
from rollstream.consumers.buffers.trajectories.index import TrajectoryEntry
from rollstream.consumers.buffers.trajectories.journal import JournalContent
from rollstream.consumers.buffers.trajectories.rows import CheckedTrajectory, FetchedArrays, Rows, bootstrapped
from rollstream.consumers.buffers.trajectories.store import AddOperation, DropOperation, Operation
from rollstream.topics.wire.trajectory_arrays import Trajectory

_FIELDS = [field.name for field in fields(Trajectory) if field.name != "arrays"]
_fields_of = attrgetter(*_FIELDS)


class _UnsavedTrajectory(NamedTuple):
    fields: tuple[Any, ...]
    """Values of the trajectory's fields, except its arrays."""
    bootstrapped: Mapping[str, NDArray[Any]]
    """Arrays with bootstrap rows; the cache has them without these rows."""


class TrajectoryMemory:
    """Fields and bootstrap rows of the trajectories of a buffer. Not thread-safe: its owner holds a lock."""

    format_name = ""
    is_open = True

    def __init__(self) -> None:
        self._kept: deque[_UnsavedTrajectory] = deque()
        """Trajectories, oldest first."""
        self._read: dict[int, dict[str, NDArray[Any]]] = {}
        """Loaded arrays that are not cached yet, by id."""

    def open(self) -> None:
        """Do nothing: memory is always open."""

    def owned(self, part: CheckedTrajectory) -> CheckedTrajectory:
        """Return the trajectory itself, because the cache copies it before `put` returns."""
        return part

    def ready(self) -> None:
        """Do nothing: no write is pending."""

    def put(self, operation: Operation) -> None:
        """Apply an operation."""
        if isinstance(operation, AddOperation):
            self._kept.append(_kept(operation.part.trajectory, operation.part.arrays, operation.part.steps))
        elif isinstance(operation, DropOperation):
            for _entry in operation.entries:
                self._kept.popleft()

    def flush(self) -> None:
        """Do nothing: there are no files."""

    def pending_count(self, ids: Iterable[int]) -> int:
        """Return 0: no write is pending."""
        return 0

    def load(self, checkpoint: SavedCheckpoint) -> JournalContent:
        """Replace the content by a checkpoint, and return it; if a file cannot be read, nothing changes."""
        content = checkpoint.content
        kept, read = deque[_UnsavedTrajectory](), {}
        for place in range(len(content)):
            trajectory, arrays = checkpoint.read(place)
            entry = content[place]
            read[entry.trajectory_id] = arrays
            kept.append(_kept(trajectory, arrays, entry.description.steps))
        self._kept, self._read = kept, read
        return replace(
            content, descriptions=[description._replace(format="", folder="") for description in content.descriptions]
        )

    def replace(self, content: JournalContent) -> None:
        """Forget everything."""
        self._kept.clear()

    def close(self) -> None:
        """Do nothing: no file is open."""

    def arrays(self, entry: TrajectoryEntry) -> FetchedArrays:
        """Return the arrays of a loaded trajectory, once; afterwards only the cache has them."""
        return FetchedArrays(self._read.pop(entry.trajectory_id), mapped=False)

    def sources(self, content: JournalContent, rows: Callable[[int], Rows]) -> Callable[[int], CheckedTrajectory]:
        """Return copies of whole trajectories by place, for a checkpoint that is written while other threads add."""
        return [self._source(place, content[place], rows) for place in range(len(content))].__getitem__

    def unpin(self) -> None:
        """Do nothing: no file was pinned."""

    def _source(self, place: int, entry: TrajectoryEntry, rows: Callable[[int], Rows]) -> CheckedTrajectory:
        kept = self._kept[place]
        steps, width = entry.description.steps, entry.description.width
        arrays = {path: array.reshape(steps, width, *array.shape[1:]).copy() for path, array in rows(place).items()}
        arrays.update(kept.bootstrapped)
        trajectory = Trajectory(arrays={}, **dict(zip(_FIELDS, kept.fields, strict=True)))
        return CheckedTrajectory(trajectory, arrays, steps, width, layout_of(arrays, 2))


def _kept(trajectory: Trajectory, arrays: Mapping[str, NDArray[Any]], steps: int) -> _UnsavedTrajectory:
    return _UnsavedTrajectory(_fields_of(trajectory), bootstrapped(arrays, steps))
