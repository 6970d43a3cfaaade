"""The folder that trajectories lie in: names of their files, how files come there, who writes, and what is swept out.

Nothing here says what a folder holds: that is in its journal.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from consumers.buffers.files import UNFINISHED, StoreError, make_directory, remove_unfinished, replacing, sync_directory
from consumers.buffers.trajectory_formats import Format
from consumers.buffers.trajectory_index import Entry
from consumers.buffers.trajectory_journal import Content
from consumers.buffers.trajectory_rows import Checked
from topics.logs import event
from topics.records import Int64

logger = logging.getLogger(__name__)
LOCK = "trajectories.lock"
LOADED = "loaded-"
"""Begin of the names of folders that hold what was loaded from elsewhere."""
ASIDE = "not-in-index-"
"""Begin of the names of folders that hold files which an index did not know."""
FILE = re.compile(r"trajectory_(\d+)_.*\.(?:npz|pt|pkl)")
"""Names of the files of trajectories."""
_PLAIN = re.compile(r"[A-Za-z0-9._-]{0,100}")
Formats = Callable[[str], Format]


def file_name(trajectory_id: int, model_weights_id: str, suffix: str) -> str:
    """trajectory_{id}_{model_weights_id}{suffix}, where the weights' id is fit for a name; else what stands for it."""
    weights = model_weights_id
    if not _PLAIN.fullmatch(weights):
        weights = urllib.parse.quote(weights, safe="")
        if len(weights) > 100:
            weights = hashlib.sha256(weights.encode()).hexdigest()
    return f"trajectory_{trajectory_id}_{weights}{suffix}"


def path_of(directory: Path, entry: Entry, formats: Formats) -> Path:
    """Where a directory has the file of a trajectory."""
    about = entry.about
    name = file_name(entry.trajectory_id, about.model_weights_id, formats(about.format).suffix)
    return directory / about.folder / name


class Found(NamedTuple):
    """A checkpoint that was read; its trajectories were not."""

    directory: Path
    content: Content
    formats: Formats

    def path(self, entry: Entry) -> Path:
        """The file of a trajectory."""
        return path_of(self.directory, entry, self.formats)

    def newest(self, count: int) -> "Found":
        """The same with its newest trajectories only."""
        content = self.content
        return self._replace(content=content.part(max(0, len(content) - count), len(content)))


def bring(found: Found, directory: Path) -> Content:
    """Link or copy the files of a checkpoint into a directory, and return the content that names them.

    Where trajectories lie there already they go to a folder of their own. Raises StoreError; nothing is brought then.
    """
    with said_of(directory):
        others = any(FILE.fullmatch(name) for name in os.listdir(directory))
        folder = f"{LOADED}{uuid.uuid4().hex}" if others and len(found.content) else ""
        place = directory / f"{folder}{UNFINISHED}" if folder else directory
        brought = []
        try:
            for number in range(len(found.content)):
                entry = found.content[number]
                path = found.path(entry)
                brought.append(place / path.name)
                place_file(brought[-1], path, found.formats(entry.about.format))
        except BaseException:
            for path in brought:
                path.unlink(missing_ok=True)
            raise
        sync_directory(place)
        if folder:
            place.rename(directory / folder)
            sync_directory(directory)
    return replace(found.content, abouts=[about._replace(folder=folder) for about in found.content.abouts])


def place_file(path: Path, source: Path | Checked, kind: Format) -> None:
    """Have the file of a trajectory at a path: linked, copied where that cannot be, or written.

    Its name is on disk when its directory is synchronised. Raises StoreError, and OSError.
    """
    make_directory(path.parent)
    if isinstance(source, Checked):
        with replacing(path, sync_name=False) as file:
            kind.write(file, source)
        return
    path.unlink(missing_ok=True)  # of a save that was killed: no journal names it
    try:
        os.link(source, path)
    except FileNotFoundError as error:
        raise StoreError(f"{source} is gone; restore it, or fill the buffer again") from error
    except OSError:  # another file system, or one without links
        with replacing(path, sync_name=False) as file, open(source, "rb") as original:
            shutil.copyfileobj(original, file, 2**20)


def sweep(directory: Path, content: Content) -> None:
    """Delete the trajectories of a directory that took another content, but those of the new. Raises StoreError."""
    with said_of(directory):
        remove_unfinished(directory)
        for path in _unnamed(directory, content):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def put_aside(directory: Path, content: Content) -> None:
    """Move files that an index does not know to a folder, and log it: its writer was killed between a file and the
    index, or the index lost its end. Deleted is only what the index says has left. Raises StoreError.
    """
    with said_of(directory):
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


def _unnamed(directory: Path, content: Content) -> list[Path]:
    """Trajectories, and folders of them, that a content does not name."""
    ids = content.entries["id"]
    here = np.array([not about.folder for about in content.abouts], bool)
    ids = ids[here[content.entries["about"]]]
    folders = {about.folder for about in content.abouts}
    found = []
    with os.scandir(directory) as items:
        for item in items:
            if item.name.startswith(LOADED) and item.is_dir():
                if item.name not in folders:
                    found.append(Path(item.path))
            elif (name := FILE.fullmatch(item.name)) and not _among(ids, int(name[1])):
                found.append(Path(item.path))
    return found


def _among(ids: Int64, trajectory_id: int) -> bool:
    place = int(np.searchsorted(ids, trajectory_id))
    return place < len(ids) and int(ids[place]) == trajectory_id


@contextlib.contextmanager
def said_of(directory: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be written ({error.strerror or error}); look at the rights there"
        ) from error
