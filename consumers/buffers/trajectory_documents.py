"""trajectory_index.json and metadata.json: what a directory of trajectories holds, for RLinf's buffers and for people.

Written whole, each in one step, after the files they name. This program reads its journal instead.
"""

import json
import uuid
from pathlib import Path
from typing import Any

from consumers.buffers.files import replacing, write_json
from consumers.buffers.trajectory_index import About
from consumers.buffers.trajectory_journal import Content
from consumers.buffers.trajectory_rows import Layout

INDEX, METADATA = "trajectory_index.json", "metadata.json"
_PIECE = 4096
"""Entries that are written at once."""


def write_documents(directory: Path, content: Content, format_name: str) -> None:
    """Write both; `format_name` is said where files of several formats are there, or none. Raises StoreError."""
    tail = _tail(content.layout)
    abouts = [json.dumps(_said_of(about, tail))[1:] for about in content.abouts]
    ids, uuids = content.entries["id"].tolist(), content.entries["uuid"].tolist()
    of = content.entries["about"].tolist()
    with replacing(directory / INDEX) as file:
        file.write(b'{"trajectory_index": {')
        for first in range(0, len(ids), _PIECE):
            part = slice(first, first + _PIECE)
            said = (
                f'"{number}": {{"uuid": "{uuid.UUID(bytes=name)}", "trajectory_id": {number}, {abouts[about]}'
                for number, name, about in zip(ids[part], uuids[part], of[part], strict=True)
            )
            file.write(((", " if first else "") + ", ".join(said)).encode())
        file.write(f'}}, "trajectory_id_list": {json.dumps(ids)}}}'.encode())
    formats = {content.abouts[about].format for about in set(of)}
    metadata = {
        "trajectory_format": formats.pop() if len(formats) == 1 else format_name,
        "size": len(content),
        "total_samples": sum(content.abouts[about].samples for about in of),
        "trajectory_counter": content.counter,
        "seed": content.seed,
    }
    write_json(directory / METADATA, metadata)


def _said_of(about: About, tail: tuple[int, ...]) -> dict[str, Any]:
    said = {
        "num_samples": about.samples,
        "shape": [about.steps, about.width, *tail],
        "max_episode_length": about.max_episode_length,
        "model_weights_id": about.model_weights_id,
    }
    return {**said, "folder": about.folder} if about.folder else said


def _tail(layout: Layout) -> tuple[int, ...]:
    """The shape of a row of what RLinf takes a trajectory's shape from: prev_logprobs, else rewards."""
    shapes = {leaf.path: leaf.shape for leaf in layout}
    return shapes.get("prev_logprobs", shapes.get("rewards", ()))
