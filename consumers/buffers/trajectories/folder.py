"""Directories of trajectories: file names, import of files, and removal of files that the content does not name.

The journal, not this module, defines the content of a directory.
"""

import contextlib
import filecmp
import hashlib
import logging
import os
import re
import shutil
import urllib.parse
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.storage.segments import layout_of
from rollstream.consumers.buffers.trajectories.formats import Format, description_of
from rollstream.consumers.buffers.trajectories.index import TrajectoryEntry
from rollstream.consumers.buffers.trajectories.journal import JournalContent
from rollstream.consumers.buffers.trajectories.rows import CheckedTrajectory, refuse_foreign
from rollstream.topics.files.atomic_files import (
    UNFINISHED,
    StoreError,
    copy_file,
    make_directory,
    remove_unfinished,
    replacing,
    sync_directory,
)
from rollstream.topics.logs import event
from rollstream.topics.records import Int64
from rollstream.topics.wire.trajectory_arrays import Trajectory, flatten

logger = logging.getLogger(__name__)
LOCK = "trajectories.lock"
LOADED = "loaded-"
"""Prefix of folders with files loaded from a checkpoint."""
ASIDE = "not-in-index-"
"""Prefix of folders with files that the index did not name."""
FILE = re.compile(r"trajectory_(\d+)_.*\.(?:npz|pt|pkl)")
"""Names of the files of trajectories."""
_PLAIN = re.compile(r"[A-Za-z0-9._-]{0,100}")
Formats = Callable[[str], Format]


def file_name(trajectory_id: int, model_weights_id: str, suffix: str) -> str:
    """Return trajectory_{id}_{model_weights_id}{suffix}; a weights id that no file name can contain is encoded."""
    weights = model_weights_id
    if not _PLAIN.fullmatch(weights):
        weights = urllib.parse.quote(weights, safe="")
        if len(weights) > 100:
            weights = hashlib.sha256(weights.encode()).hexdigest()
    return f"trajectory_{trajectory_id}_{weights}{suffix}"


def path_of(directory: Path, entry: TrajectoryEntry, formats: Formats) -> Path:
    """Path of the file of a trajectory in a directory."""
    description = entry.description
    name = file_name(entry.trajectory_id, description.model_weights_id, formats(description.format).suffix)
    return directory / description.folder / name


class SavedCheckpoint(NamedTuple):
    """The content of a checkpoint whose trajectories are not read yet."""

    directory: Path
    content: JournalContent
    formats: Formats

    def path(self, entry: TrajectoryEntry) -> Path:
        """Path of the file of a trajectory."""
        return path_of(self.directory, entry, self.formats)

    def source(self, place: int) -> Path:
        """Path of the file of the trajectory at a place."""
        return self.path(self.content[place])

    def newest(self, count: int) -> "SavedCheckpoint":
        """Return the same checkpoint with only its `count` newest trajectories."""
        content = self.content
        return self._replace(content=content.part(max(0, len(content) - count), len(content)))

    def read(self, place: int) -> tuple[Trajectory, dict[str, NDArray[Any]]]:
        """Read the trajectory at a place; return it and its arrays by path. Raises StoreError if its file is gone,
        damaged, or has other arrays than the content."""
        entry = self.content[place]
        path, description = self.path(entry), entry.description
        try:
            trajectory = self.formats(description.format).read(path)
        except FileNotFoundError as error:
            raise StoreError(f"{path} is gone; restore it, or fill the buffer again") from error
        arrays = flatten(trajectory.arrays)
        refuse_foreign(arrays, self.content.layout, description.steps, description.width, str(path))
        return trajectory, arrays


def place_files(
    directory: Path,
    content: JournalContent,
    source: Callable[[int], Path | CheckedTrajectory],
    formats: Formats,
    *,
    kept: Collection[int] | None,
) -> JournalContent:
    """Create the files of a content in a directory, and return the content that names them.

    `source` returns the file of the trajectory at a place, or a trajectory to write. Trajectories with an id in `kept`
    are there already; if `kept` is None, the directory has other trajectories, and the files go to a new folder. If it
    raises StoreError, no file is left behind.
    """
    folder = f"{LOADED}{uuid.uuid4().hex}" if kept is None and len(content) else ""
    target = directory / f"{folder}{UNFINISHED}" if folder else directory
    descriptions = [description._replace(folder="") for description in content.descriptions]
    content, placed = replace(content, descriptions=descriptions), []
    with store_errors(directory):
        try:
            for place in range(len(content)):
                entry = content[place]
                if entry.trajectory_id not in (kept or ()):
                    placed.append(path_of(target, entry, formats))
                    place_file(placed[-1], source(place), formats(entry.description.format))
        except BaseException:
            for path in placed:
                path.unlink(missing_ok=True)
            raise
        sync_directory(target)
        if folder:
            target.rename(directory / folder)
            sync_directory(directory)
    return replace(content, descriptions=[description._replace(folder=folder) for description in descriptions])


def place_file(path: Path, source: Path | CheckedTrajectory, kind: Format) -> None:
    """Create the file of a trajectory at a path: link it, copy it if linking fails, or write it.

    The name is on disk only after the caller has synced the directory. Raises StoreError or OSError.
    """
    make_directory(path.parent)
    if isinstance(source, CheckedTrajectory):
        with replacing(path, sync_name=False) as file:
            kind.write(file, source)
        return
    path.unlink(missing_ok=True)  # A file there was left by a killed save, and no journal names it.
    try:
        os.link(source, path)
    except FileNotFoundError as error:
        raise StoreError(f"{source} is gone; restore it, or fill the buffer again") from error
    except OSError:  # The source is on another file system, or hard links are not supported.
        copy_file(source, path, sync_name=False)
        # The time tells `has_content` that the copy is up to date; without it, `has_content` compares the bytes.
        with contextlib.suppress(OSError):
            times = source.stat()
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def has_content(path: Path, source: Path | CheckedTrajectory, kind: Format) -> bool:
    """Whether the file at a path is what `place_file` would create there. Raises OSError."""
    if isinstance(source, CheckedTrajectory):
        try:
            stored = kind.read(path)
        except StoreError:
            return False
        arrays = flatten(stored.arrays)
        return (
            description_of(stored) == description_of(source.trajectory)
            and layout_of(arrays, 2) == source.layout
            and all(_same_bytes(arrays[name], array) for name, array in source.arrays.items())
        )
    try:
        return os.path.samefile(path, source) or filecmp.cmp(path, source)
    except FileNotFoundError:
        return False


def _same_bytes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether arrays of one dtype, apart from its byte order, have the same shape and the same values, bit for bit."""
    return one.shape == other.shape and one.tobytes() == other.astype(one.dtype, copy=False).tobytes()


def sweep(directory: Path, content: JournalContent) -> None:
    """Delete the trajectories of a directory that its new content does not name. Raises StoreError."""
    with store_errors(directory):
        remove_unfinished(directory)
        for path in _unnamed(directory, content):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def put_aside(directory: Path, content: JournalContent) -> None:
    """Move files that the index does not name to a folder, and log this. Such files exist if the writer was killed
    between writing a file and writing the index, or if the end of the index was lost. Files are deleted only if the
    index records their removal. Raises StoreError.
    """
    with store_errors(directory):
        remove_unfinished(directory)
        ids = content.entries["id"]
        first_kept = int(ids[0]) if len(ids) else content.counter
        unknown = []
        for path in _unnamed(directory, content):
            name = FILE.fullmatch(path.name)
            if name and int(name[1]) < first_kept:
                path.unlink()
            else:
                unknown.append(path)
        if unknown:
            aside = directory / f"{ASIDE}{uuid.uuid4().hex}"
            aside.mkdir()
            for path in unknown:
                path.rename(aside / path.name)
            sync_directory(directory)
            event(logger, "trajectories_not_in_index", level=logging.WARNING, count=len(unknown), moved_to=str(aside))


def _unnamed(directory: Path, content: JournalContent) -> list[Path]:
    """Files and folders of trajectories that a content does not name."""
    ids = content.entries["id"]
    direct = np.array([not description.folder for description in content.descriptions], bool)
    ids = ids[direct[content.entries["description"]]]
    folders = {description.folder for description in content.descriptions}
    unnamed = []
    with os.scandir(directory) as items:
        for item in items:
            if item.name.startswith(LOADED) and item.is_dir():
                if item.name not in folders:
                    unnamed.append(Path(item.path))
            elif (name := FILE.fullmatch(item.name)) and not _contains(ids, int(name[1])):
                unnamed.append(Path(item.path))
    return unnamed


def _contains(ids: Int64, trajectory_id: int) -> bool:
    place = int(np.searchsorted(ids, trajectory_id))
    return place < len(ids) and int(ids[place]) == trajectory_id


@contextlib.contextmanager
def store_errors(directory: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be written ({error.strerror or error}); check the permissions there"
        ) from error
