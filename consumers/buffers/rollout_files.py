"""A rollout buffer on disk: one Arrow IPC file, whole or not there, that runs no code when it is read.

A row is a rollout as it is on the wire (Avro), with its advantage and how often it was drawn; position, random state
and counts are in the schema's metadata.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from consumers.buffers.files import StoreError, replacing
from topics.codec import decode_as, encode
from topics.errors import RecordError
from topics.records import Float32, Rollout

FILE = "rollout-buffer.arrow"
_FORM = b"rollstream.rollout_buffer"
_SCHEMA = pa.schema(
    [
        ("rollout", pa.large_binary()),
        ("advantage", pa.float64()),
        ("advantages", pa.large_binary()),
        ("usage_count", pa.int64()),
        ("weight_step", pa.int64()),
        ("timestamp", pa.float64()),
    ]
)


@dataclass(frozen=True)
class KeptRollout:
    """One rollout, as it is on disk."""

    rollout: Rollout
    advantage: float | Float32
    usage_count: int
    weight_step: int
    timestamp: float


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A buffer, as it is on disk."""

    rollouts: tuple[KeptRollout, ...]
    """By environment, each in order of arrival."""
    counts: Mapping[str, int]
    stream_s: float
    position: Mapping[int, int]


def save_rollouts(directory: Path, kept: Kept) -> None:
    """Write, in place of what was there. Raises StoreError."""
    state = {
        "version": 1,
        "counts": dict(kept.counts),
        "stream_s": kept.stream_s,
        "position": {str(partition): offset for partition, offset in kept.position.items()},
    }
    numbers = [k.advantage if isinstance(k.advantage, float) else None for k in kept.rollouts]
    arrays = [None if isinstance(k.advantage, float) else k.advantage.tobytes() for k in kept.rollouts]
    table = pa.table(
        {
            "rollout": pa.array([encode(k.rollout) for k in kept.rollouts], pa.large_binary()),
            "advantage": pa.array(numbers, pa.float64()),
            "advantages": pa.array(arrays, pa.large_binary()),
            "usage_count": pa.array([k.usage_count for k in kept.rollouts], pa.int64()),
            "weight_step": pa.array([k.weight_step for k in kept.rollouts], pa.int64()),
            "timestamp": pa.array([k.timestamp for k in kept.rollouts], pa.float64()),
        },
        schema=_SCHEMA.with_metadata({_FORM: json.dumps(state).encode()}),
    )
    with replacing(directory / FILE) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def load_rollouts(directory: Path) -> Kept:
    """Read. Raises StoreError where nothing whole of ours is there."""
    path = directory / FILE
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        state = json.loads((table.schema.metadata or {})[_FORM])
        rows = table.select(_SCHEMA.names).to_pydict()
        rollouts = tuple(
            KeptRollout(
                decode_as(Rollout, rollout),
                np.frombuffer(array, "<f4") if number is None else number,
                usage_count,
                weight_step,
                timestamp,
            )
            for rollout, number, array, usage_count, weight_step, timestamp in zip(*rows.values(), strict=True)
        )
        return Kept(
            rollouts=rollouts,
            counts=state["counts"],
            stream_s=state["stream_s"],
            position={int(partition): offset for partition, offset in state["position"].items()},
        )
    except FileNotFoundError as error:
        raise StoreError(
            f"{directory} holds no {FILE}; nothing was saved there, fill the buffer from the log"
        ) from error
    except (pa.ArrowInvalid, OSError, KeyError, ValueError, TypeError, RecordError) as error:
        raise StoreError(f"{path} is no rollout buffer ({error}); fill the buffer from the log again") from error
