"""Trajectories that are in memory alone, for a buffer that saves none by itself: what its cache lacks of them.

Takes the place of a store of files, with the same methods.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from numpy.typing import NDArray

from consumers.buffers.files import StoreError
from consumers.buffers.trajectory_folder import Found
from consumers.buffers.trajectory_index import Entry
from consumers.buffers.trajectory_journal import Content
from consumers.buffers.trajectory_rows import Checked, Fetched, Rows, bootstrapped, layout_of, refuse_foreign
from consumers.buffers.trajectory_store import Add, Drop, Operation
from topics.trajectories import Trajectory, flatten

_FIELDS = [field.name for field in fields(Trajectory) if field.name != "arrays"]
_fields_of = attrgetter(*_FIELDS)


class _Kept(NamedTuple):
    fields: tuple[Any, ...]
    """All of a trajectory but its arrays."""
    bootstrapped: Mapping[str, NDArray[Any]]
    """Arrays that have rows besides, which the cache leaves out."""


class TrajectoryMemory:
    """Not thread-safe: its owner holds a lock."""

    format_name = ""
    is_open = True

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        """Oldest first."""
        self._read: dict[int, dict[str, NDArray[Any]]] = {}
        """Arrays that were loaded and wait to be cached, by id."""

    def open(self) -> None:
        """Nothing: it is."""

    def owned(self, part: Checked) -> Checked:
        """The trajectory itself: the cache copies it before `put` returns."""
        return part

    def ready(self) -> None:
        """Nothing waits."""

    def put(self, operation: Operation) -> None:
        """Keep what is to be kept of an operation."""
        if isinstance(operation, Add):
            self._kept.append(_kept(operation.part.trajectory, operation.part.arrays, operation.part.steps))
        elif isinstance(operation, Drop):
            for _entry in operation.entries:
                self._kept.popleft()

    def flush(self) -> None:
        """Nothing is on disk."""

    def waiting(self, ids: Iterable[int]) -> int:
        """None: nothing is to be on disk."""
        return 0

    def load(self, found: Found) -> Content:
        """Hold what a checkpoint does instead, and return that; nothing changes where a file cannot be read."""
        content = found.content
        kept, read = deque[_Kept](), {}
        for place in range(len(content)):
            entry = content[place]
            path = found.path(entry)
            try:
                trajectory = found.formats(entry.about.format).read(path)
            except FileNotFoundError as error:
                raise StoreError(f"{path} is gone; restore it, or fill the buffer again") from error
            arrays = flatten(trajectory.arrays)
            refuse_foreign(arrays, content.layout, entry.about.steps, entry.about.width, str(path))
            read[entry.trajectory_id] = arrays
            kept.append(_kept(trajectory, arrays, entry.about.steps))
        self._kept, self._read = kept, read
        return replace(content, abouts=[about._replace(format="", folder="") for about in content.abouts])

    def replace(self, content: Content) -> None:
        """Hold nothing any more."""
        self._kept.clear()

    def close(self) -> None:
        """Nothing to give back."""

    def arrays(self, entry: Entry) -> Fetched:
        """Arrays of a trajectory that was loaded, once: it is in the cache from then on."""
        return Fetched(self._read.pop(entry.trajectory_id), mapped=False)

    def sources(self, content: Content, rows: Callable[[int], Rows]) -> Callable[[int], Checked]:
        """The whole trajectories by place, copied: a checkpoint is written of them while others add."""
        return [self._source(place, content[place], rows) for place in range(len(content))].__getitem__

    def unpin(self) -> None:
        """Nothing was kept from going."""

    def _source(self, place: int, entry: Entry, rows: Callable[[int], Rows]) -> Checked:
        kept = self._kept[place]
        steps, width = entry.about.steps, entry.about.width
        arrays = {path: array.reshape(steps, width, *array.shape[1:]).copy() for path, array in rows(place).items()}
        arrays.update(kept.bootstrapped)
        trajectory = Trajectory(arrays={}, **dict(zip(_FIELDS, kept.fields, strict=True)))
        return Checked(trajectory, arrays, steps, width, layout_of(arrays))


def _kept(trajectory: Trajectory, arrays: Mapping[str, NDArray[Any]], steps: int) -> _Kept:
    return _Kept(_fields_of(trajectory), bootstrapped(arrays, steps))
