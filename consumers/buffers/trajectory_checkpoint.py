"""Checkpoints of trajectory buffers: directories that hold a file for each trajectory, and a journal that names them.

The journal is written last, in one step, and is what counts; trajectory_index.json and metadata.json beside it are for
others, in RLinf's form. Directories that RLinf wrote are read too.
"""

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from consumers.buffers.files import (
    StoreError,
    make_directory,
    read_json,
    remove_unfinished,
    sync_directory,
)
from consumers.buffers.trajectory_documents import INDEX, METADATA, write_documents
from consumers.buffers.trajectory_folder import LOADED, LOCK, Formats, Found, file_name, place_file, said_of, sweep
from consumers.buffers.trajectory_index import About, TrajectoryIndex, uuid_of
from consumers.buffers.trajectory_journal import Content, read_content, write_content
from consumers.buffers.trajectory_rows import Checked, Layout, layout_of, refuse_foreign
from topics.errors import ConfigurationError
from topics.logs import event

logger = logging.getLogger(__name__)
_OLD_INDEX = "trajector_index.json"
"""As RLinf's tools once called it."""


class NoCheckpoint(StoreError, FileNotFoundError):
    """Nothing was saved in a directory."""


class RankOutOfRange(ConfigurationError, ValueError):
    """A rank is none of those there are."""


def read_checkpoint(directory: Path, formats: Formats) -> Found:
    """What was saved in a directory. Raises NoCheckpoint where nothing was, StoreError for what is damaged."""
    try:
        content = read_content(directory)
    except FileNotFoundError:
        content = _foreign(directory, formats)
    return Found(directory, content, formats)


def shard(found: Found, local_rank: int, world_size: int) -> Found:
    """The share of one rank: contiguous, one more for each of the first where they do not divide.

    The next id is that after the highest of the share, 0 where that is empty. Raises RankOutOfRange.
    """
    if not 0 <= local_rank < world_size:
        raise RankOutOfRange(f"rank {local_rank} of {world_size}; give a rank from 0 to one below world_size")
    each, more = divmod(len(found.content), world_size)
    begin = local_rank * each + min(local_rank, more)
    content = found.content.part(begin, begin + each + (local_rank < more))
    counter = content[len(content) - 1].trajectory_id + 1 if len(content) else 0
    return found._replace(content=replace(content, counter=counter))


def write_checkpoint(
    directory: Path, content: Content, source: Callable[[int], Path | Checked], formats: Formats, format_name: str
) -> None:
    """Save: `source` gives the file of the trajectory at each place, or a trajectory to be written.

    Raises StoreError; what was saved there before is then as it was.
    """
    if (directory / LOCK).exists():
        raise StoreError(f"{directory} is a directory that a buffer saves to by itself; save checkpoints elsewhere")
    with said_of(directory):
        make_directory(directory)
        remove_unfinished(directory)
        before = _saved_before(directory)
        abouts = [about._replace(folder="", format=about.format or format_name) for about in content.abouts]
        content = replace(content, abouts=abouts)
        # Where another run's, or another past of this one, lies there under the same ids, files go to a folder of their
        # own: what is there stays whole until the journal is replaced.
        folder = "" if before is not None and _agree(before, content) else f"{LOADED}{uuid.uuid4().hex}"
        content = replace(content, abouts=[about._replace(folder=folder) for about in abouts])
        known = _ids(before)
        for place in range(len(content)):
            entry = content[place]
            path = Found(directory, content, formats).path(entry)
            if not folder and entry.trajectory_id in known and path.exists():
                continue
            place_file(path, source(place), formats(entry.about.format))
        sync_directory(directory)
        if folder and len(content):
            sync_directory(directory / folder)
        write_documents(directory, content, format_name)
        write_content(directory, content)
        sweep(directory, content)


# ------------------------------------------------------------------ writing


def _saved_before(directory: Path) -> Content | None:
    """What the directory holds; None where that is no checkpoint of ours, but files there are."""
    try:
        return read_content(directory)
    except FileNotFoundError:
        return None if (directory / INDEX).exists() else Content()


def _ids(content: Content | None) -> frozenset[int]:
    return frozenset(() if content is None else content.entries["id"].tolist())


def _agree(before: Content, content: Content) -> bool:
    """Whether every id that both have is of the same trajectory, and has its file in the directory itself."""
    if any(about.folder for about in before.abouts):
        return False
    _, old, new = np.intersect1d(before.entries["id"], content.entries["id"], assume_unique=True, return_indices=True)
    same = before.entries["uuid"][old] == content.entries["uuid"][new]
    formats = [before.abouts[i].format for i in before.entries["about"][old]]
    return bool(np.all(same)) and formats == [content.abouts[i].format for i in content.entries["about"][new]]


# ------------------------------------------------------------------ RLinf's


def _foreign(directory: Path, formats: Formats) -> Content:
    """A directory that RLinf wrote, every file of which is looked into, as nobody did before. Entries whose files it
    lacks are left out, and that is logged."""
    try:
        metadata = read_json(directory / METADATA)
        index = read_json(directory / (INDEX if (directory / INDEX).exists() else _OLD_INDEX))
    except FileNotFoundError as error:
        raise NoCheckpoint(
            f"{directory} holds no checkpoint: {error.filename} is not there; nothing was saved"
        ) from error
    try:
        return _content_of(directory, metadata, index, formats)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{directory / INDEX} is no index of trajectories ({error!r}); restore it") from error


def _content_of(directory: Path, metadata: Any, index: Any, formats: Formats) -> Content:
    name = metadata.get("trajectory_format", "pt")
    kind = formats(name)
    there = set(os.listdir(directory))
    found, lacking = TrajectoryIndex(), []
    layout: Layout = ()
    row_bytes = 0
    ids = [int(number) for number in index["trajectory_id_list"]]
    if ids != sorted(set(ids)):
        raise ValueError("its ids do not ascend")
    for number in ids:
        said = index["trajectory_index"][str(number)]
        weights = said.get("model_weights_id") or ""
        file = file_name(number, weights, kind.suffix)
        if file not in there:
            lacking.append(number)
            continue
        arrays = kind.arrays(directory / file)
        if not layout:
            layout = layout_of(arrays)
            row_bytes = sum(leaf.row_bytes for leaf in layout)
        steps, width = map(int, said["shape"][:2])
        refuse_foreign(arrays, layout, steps, width, str(directory / file))
        about = About(steps, width, int(said.get("max_episode_length") or 0), weights, "", name)
        found.counter = number
        uid = said.get("uuid") or Path(file).stem
        found.append(uuid_of(uid), about, row_bytes * about.samples)
    if lacking:
        event(
            logger,
            "trajectories_without_a_file",
            level=logging.WARNING,
            directory=str(directory),
            count=len(lacking),
            first=lacking[0],
        )
    found.counter = max(found.counter, int(metadata.get("trajectory_counter") or 0))
    seed = metadata.get("seed")
    return replace(Content.of(found, layout), seed=None if seed is None else int(seed))
