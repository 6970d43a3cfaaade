"""trajectory_index.json and metadata.json: the content of a trajectory directory, for RLinf's buffers and for people.

Each is written atomically, after the files that it names. This program reads its journal instead.
"""

import json
import uuid
from pathlib import Path
from typing import Any

from rollstream.consumers.buffers.storage.layouts import Layout
from rollstream.consumers.buffers.trajectories.index import Description
from rollstream.consumers.buffers.trajectories.journal import JournalContent
from rollstream.consumers.files.atomic_files import replacing, write_json

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
