"""Checkpoints of trajectory buffers: directories with one file for each trajectory and a journal that names them.

The journal is written last, atomically, and defines the content of the checkpoint; trajectory_index.json and
metadata.json next to it are for people and other programs, in RLinf's form, and written atomically, after the files
that they name. Directories that RLinf wrote can be read too.
"""

import json
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.consumers.buffers.storage.segments import Layout, layout_of
from rollstream.consumers.buffers.trajectories.folder import (
    LOCK,
    Formats,
    SavedCheckpoint,
    file_name,
    has_content,
    place_files,
    store_errors,
    sweep,
)
from rollstream.consumers.buffers.trajectories.index import Description, TrajectoryIndex, uuid_of
from rollstream.consumers.buffers.trajectories.journal import JournalContent, read_content, write_content
from rollstream.consumers.buffers.trajectories.rows import CheckedTrajectory, refuse_foreign
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import (
    StoreError,
    make_directory,
    read_json,
    remove_unfinished,
    replacing,
    write_json,
)
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

INDEX, METADATA = "trajectory_index.json", "metadata.json"
_PIECE = 4096
"""Number of entries written at once."""


def write_documents(directory: Path, content: JournalContent, format_name: str) -> None:
    """Write both documents, with `format_name` if there are no files or several formats. Raises StoreError."""
    row_shape = _row_shape(content.layout)
    shared = [json.dumps(_shared_fields(description, row_shape))[1:] for description in content.descriptions]
    ids, uuids = content.entries["id"].tolist(), content.entries["uuid"].tolist()
    numbers = content.entries["description"].tolist()
    with replacing(directory / INDEX) as file:
        file.write(b'{"trajectory_index": {')
        for first in range(0, len(ids), _PIECE):
            part = slice(first, first + _PIECE)
            lines = (
                f'"{trajectory_id}": {{"uuid": "{uuid.UUID(bytes=name)}", "trajectory_id": {trajectory_id}, {shared[n]}'
                for trajectory_id, name, n in zip(ids[part], uuids[part], numbers[part], strict=True)
            )
            file.write(((", " if first else "") + ", ".join(lines)).encode())
        file.write(f'}}, "trajectory_id_list": {json.dumps(ids)}}}'.encode())
    formats = {content.descriptions[number].format for number in set(numbers)}
    metadata = {
        "trajectory_format": formats.pop() if len(formats) == 1 else format_name,
        "size": len(content),
        "total_samples": sum(content.descriptions[number].samples for number in numbers),
        "trajectory_counter": content.counter,
        "seed": content.seed,
    }
    write_json(directory / METADATA, metadata)


def _shared_fields(description: Description, row_shape: tuple[int, ...]) -> dict[str, Any]:
    fields = {
        "num_samples": description.samples,
        "shape": [description.steps, description.width, *row_shape],
        "max_episode_length": description.max_episode_length,
        "model_weights_id": description.model_weights_id,
    }
    return {**fields, "folder": description.folder} if description.folder else fields


def _row_shape(layout: Layout) -> tuple[int, ...]:
    """Return the row shape of prev_logprobs, else of rewards, from which RLinf takes the shape of a trajectory."""
    shapes = {leaf.path: leaf.shape for leaf in layout}
    return shapes.get("prev_logprobs", shapes.get("rewards", ()))


_OLD_INDEX = "trajector_index.json"
"""Name of the index in earlier versions of RLinf's tools."""


class NoCheckpoint(StoreError, FileNotFoundError):
    """A directory contains no checkpoint."""


class RankOutOfRange(ConfigurationError, ValueError):
    """A rank is negative, or not below the number of ranks."""


def read_checkpoint(directory: Path, formats: Formats) -> SavedCheckpoint:
    """Read the listing of a checkpoint. Raises NoCheckpoint if there is none, StoreError if it is damaged or cannot be
    read."""
    try:
        content = read_content(directory)
    except FileNotFoundError:
        content = _foreign(directory, formats)
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be read ({error.strerror or error}); give a readable directory of trajectories"
        ) from error
    return SavedCheckpoint(directory, content, formats)


def shard(checkpoint: SavedCheckpoint, local_rank: int, world_size: int) -> SavedCheckpoint:
    """Return the contiguous share of one rank; the first ranks get one trajectory more if the shares are not equal.

    The next id follows the highest id of the share, and is 0 if the share is empty. Raises RankOutOfRange.
    """
    if not 0 <= local_rank < world_size:
        raise RankOutOfRange(f"rank {local_rank} of {world_size}; give a rank from 0 to one below world_size")
    each, more = divmod(len(checkpoint.content), world_size)
    begin = local_rank * each + min(local_rank, more)
    content = checkpoint.content.part(begin, begin + each + (local_rank < more))
    counter = content[len(content) - 1].trajectory_id + 1 if len(content) else 0
    return checkpoint._replace(content=replace(content, counter=counter))


def write_checkpoint(
    directory: Path,
    content: JournalContent,
    source: Callable[[int], Path | CheckedTrajectory],
    formats: Formats,
    format_name: str,
) -> None:
    """Write a checkpoint; `source` returns the file of the trajectory at a place, or a trajectory to write.

    If it raises StoreError, the earlier checkpoint is unchanged.
    """
    if (directory / LOCK).exists():
        raise StoreError(f"{directory} is the auto_save_path of a buffer; save checkpoints elsewhere")
    with store_errors(directory):
        make_directory(directory)
        remove_unfinished(directory)
        before = _saved_before(directory)
        descriptions = [
            description._replace(folder="", format=description.format or format_name)
            for description in content.descriptions
        ]
        content = replace(content, descriptions=descriptions)
        # If the directory has other trajectories under the same ids, the files go to a new folder, so that the earlier
        # checkpoint stays intact until the journal is replaced.
        kept = None if before is None else _kept(before, SavedCheckpoint(directory, content, formats), source)
        content = place_files(directory, content, source, formats, kept=kept)
        write_documents(directory, content, format_name)
        write_content(directory, content)
        sweep(directory, content)


# ------------------------------------------------------------------ writing


def _saved_before(directory: Path) -> JournalContent | None:
    """Content of the directory; None if another program wrote its files."""
    try:
        return read_content(directory)
    except FileNotFoundError:
        return None if (directory / INDEX).exists() else JournalContent()


def _kept(
    before: JournalContent, checkpoint: SavedCheckpoint, source: Callable[[int], Path | CheckedTrajectory]
) -> frozenset[int] | None:
    """Ids of the trajectories of a new checkpoint whose files are there; None if a shared id names another trajectory,
    or the same with other content, such as new labels, or if a file of `before` is in a subfolder."""
    if not _agree(before, checkpoint.content):
        return None
    known, kept = frozenset(before.entries["id"].tolist()), []
    for place in range(len(checkpoint.content)):
        entry = checkpoint.content[place]
        path = checkpoint.path(entry)
        if entry.trajectory_id in known and path.exists():
            if not has_content(path, source(place), checkpoint.formats(entry.description.format)):
                return None
            kept.append(entry.trajectory_id)
    return frozenset(kept)


def _agree(before: JournalContent, content: JournalContent) -> bool:
    """Whether shared ids name the same trajectory and format in both, and no file of `before` is in a subfolder."""
    if any(description.folder for description in before.descriptions):
        return False
    _, old, new = np.intersect1d(before.entries["id"], content.entries["id"], assume_unique=True, return_indices=True)
    same = before.entries["uuid"][old] == content.entries["uuid"][new]
    formats = [before.descriptions[i].format for i in before.entries["description"][old]]
    return bool(np.all(same)) and formats == [
        content.descriptions[i].format for i in content.entries["description"][new]
    ]


# ------------------------------------------------------------------ directories of RLinf


def _foreign(directory: Path, formats: Formats) -> JournalContent:
    """Return the content of a directory that RLinf wrote. Checks every file; omits and logs entries without a file."""
    try:
        metadata = read_json(directory / METADATA)
        index = read_json(directory / (INDEX if (directory / INDEX).exists() else _OLD_INDEX))
    except FileNotFoundError as error:
        raise NoCheckpoint(
            f"{directory} contains no checkpoint: {error.filename} is missing; nothing was saved"
        ) from error
    try:
        return _content_of(directory, metadata, index, formats)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{directory / INDEX} is not a valid index of trajectories ({error!r}); restore it") from error


def _content_of(directory: Path, metadata: Any, index: Any, formats: Formats) -> JournalContent:
    name = metadata.get("trajectory_format", "pt")
    kind = formats(name)
    names = set(os.listdir(directory))
    trajectories, missing = TrajectoryIndex(), []
    layout: Layout = ()
    row_bytes = 0
    ids = [int(number) for number in index["trajectory_id_list"]]
    if ids != sorted(set(ids)):
        raise ValueError("its ids are not in ascending order")
    for number in ids:
        row = index["trajectory_index"][str(number)]
        weights = row.get("model_weights_id") or ""
        file = file_name(number, weights, kind.suffix)
        if file not in names:
            missing.append(number)
            continue
        arrays = kind.arrays(directory / file)
        if not layout:
            layout = layout_of(arrays, 2)
            row_bytes = sum(leaf.row_bytes for leaf in layout)
        steps, width = map(int, row["shape"][:2])
        refuse_foreign(arrays, layout, steps, width, str(directory / file))
        description = Description(steps, width, int(row.get("max_episode_length") or 0), weights, "", name)
        trajectories.counter = number
        uid = row.get("uuid") or Path(file).stem
        trajectories.append(uuid_of(uid), description, row_bytes * description.samples)
    if missing:
        event(
            logger,
            "trajectories_without_a_file",
            level=logging.WARNING,
            directory=str(directory),
            count=len(missing),
            first=missing[0],
        )
    trajectories.counter = max(trajectories.counter, int(metadata.get("trajectory_counter") or 0))
    seed = metadata.get("seed")
    return replace(JournalContent.of(trajectories, layout), seed=None if seed is None else int(seed))
