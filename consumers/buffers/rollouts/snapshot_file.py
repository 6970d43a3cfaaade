"""The file of a saved rollout buffer: one Arrow IPC file with a digest, written atomically; reading it runs no code.

A row is a rollout in its wire format (Avro), with its advantage and number of draws. Position, random state and counts
are in the schema's metadata. The digest is checked first, because Arrow can crash on damaged input.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from blake3 import blake3

from rollstream.consumers.files.atomic_files import StoreError, replacing
from rollstream.topics.codec import decode_as, encode
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Float32, Rollout

FILE = "rollout-buffer.arrow"
_MAGIC = b"\nblake3"
_DIGEST_BYTES = 32
"""_MAGIC and a BLAKE2b digest follow Arrow's bytes."""
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
class SnapshotRollout:
    """One rollout on disk."""

    rollout: Rollout
    advantage: float | Float32
    usage_count: int
    weight_step: int
    timestamp: float


@dataclass(frozen=True, kw_only=True)
class BufferSnapshot:
    """The state of a rollout buffer on disk."""

    rollouts: tuple[SnapshotRollout, ...]
    """Rollouts by environment, in order of arrival."""
    counts: Mapping[str, int]
    stream_s: float
    position: Mapping[int, int]


def save_rollouts(directory: Path, snapshot: BufferSnapshot) -> None:
    """Write the file of a buffer, and replace any earlier one. Raises StoreError."""
    state = {
        "version": 1,
        "counts": dict(snapshot.counts),
        "stream_s": snapshot.stream_s,
        "position": {str(partition): offset for partition, offset in snapshot.position.items()},
    }
    numbers = [k.advantage if isinstance(k.advantage, float) else None for k in snapshot.rollouts]
    arrays = [None if isinstance(k.advantage, float) else k.advantage.tobytes() for k in snapshot.rollouts]
    table = pa.table(
        {
            "rollout": pa.array([encode(k.rollout) for k in snapshot.rollouts], pa.large_binary()),
            "advantage": pa.array(numbers, pa.float64()),
            "advantages": pa.array(arrays, pa.large_binary()),
            "usage_count": pa.array([k.usage_count for k in snapshot.rollouts], pa.int64()),
            "weight_step": pa.array([k.weight_step for k in snapshot.rollouts], pa.int64()),
            "timestamp": pa.array([k.timestamp for k in snapshot.rollouts], pa.float64()),
        },
        schema=_SCHEMA.with_metadata({_FORM: json.dumps(state).encode()}),
    )
    with replacing(directory / FILE) as file:
        digested = _DigestingFile(file)
        with pa.ipc.new_file(digested, table.schema) as writer:
            writer.write_table(table)
        file.write(_MAGIC + digested.digest())


def load_rollouts(directory: Path) -> BufferSnapshot:
    """Read the file of a buffer. Raises StoreError if it is missing, damaged, or written by another program."""
    path = directory / FILE
    try:
        table = pa.ipc.open_file(pa.py_buffer(_checked_bytes(path))).read_all()
        state = json.loads((table.schema.metadata or {})[_FORM])
        rows = table.select(_SCHEMA.names).to_pydict()
        rollouts = tuple(
            SnapshotRollout(
                decode_as(Rollout, rollout),
                np.frombuffer(array, "<f4") if number is None else number,
                usage_count,
                weight_step,
                timestamp,
            )
            for rollout, number, array, usage_count, weight_step, timestamp in zip(*rows.values(), strict=True)
        )
        return BufferSnapshot(
            rollouts=rollouts,
            counts=state["counts"],
            stream_s=state["stream_s"],
            position={int(partition): offset for partition, offset in state["position"].items()},
        )
    except FileNotFoundError as error:
        raise StoreError(
            f"{directory} contains no {FILE}; nothing was saved there, so fill the buffer from the log"
        ) from error
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, RecordError) as error:
        raise StoreError(
            f"{path} is not a valid rollout buffer ({error}); restore it from a copy, or fill the buffer from the log "
            "again"
        ) from error


class _DigestingFile(io.RawIOBase):
    """A writable file that computes the digest of the bytes written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = blake3()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def digest(self) -> bytes:
        return self._hash.digest()


def _checked_bytes(path: Path) -> memoryview:
    """Return the bytes before the digest, and check it. Raises FileNotFoundError, or ValueError for a damaged file."""
    data = memoryview(path.read_bytes())
    end = len(data) - _DIGEST_BYTES
    content = data[: max(0, end - len(_MAGIC))]
    if data[len(content) :] != _MAGIC + blake3(content).digest(length=_DIGEST_BYTES):
        raise ValueError("it is damaged: its content differs from what was written")
    return content
