"""The file of a saved rollout buffer: a journal that is written at once, atomically; reading it runs no code.

Its first record is a JSON text with position, random state and counts; each further record is a rollout in its wire
format (Avro), with its advantage and number of draws.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollstream.consumers.buffers.storage.journal import NoJournal, read_journal, write_journal
from rollstream.consumers.files.atomic_files import StoreError
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Float32, Rollout
from rollstream.topics.wire.codec import decode_as, encode

FILE = "rollout-buffer.journal"


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


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    """A rollout as it is in the file."""

    rollout: bytes
    advantage: float | bytes
    usage_count: int
    weight_step: int
    timestamp: float


_DECODER: msgspec.msgpack.Decoder[str | _Stored] = msgspec.msgpack.Decoder(str | _Stored)


def save_rollouts(directory: Path, snapshot: BufferSnapshot) -> None:
    """Write the file of a buffer, and replace any earlier one. Raises StoreError."""
    state = {
        "rollouts": len(snapshot.rollouts),
        "counts": dict(snapshot.counts),
        "stream_s": snapshot.stream_s,
        "position": {str(partition): offset for partition, offset in snapshot.position.items()},
    }
    write_journal(directory / FILE, json.dumps(state), *_stored(snapshot))


def _stored(snapshot: BufferSnapshot) -> Iterator[_Stored]:
    for held in snapshot.rollouts:
        advantage = float(held.advantage) if isinstance(held.advantage, float) else held.advantage.tobytes()
        yield _Stored(encode(held.rollout), advantage, held.usage_count, int(held.weight_step), float(held.timestamp))


def load_rollouts(directory: Path) -> BufferSnapshot:
    """Read the file of a buffer. Raises StoreError if it is missing, damaged, or written by another program."""
    path = directory / FILE
    try:
        reading = read_journal(path, _DECODER)
        state: Any = json.loads(str(reading.records[0])) if reading.records else {}
        stored = [record for record in reading.records if isinstance(record, _Stored)]
        if reading.damaged or len(stored) != state.get("rollouts"):
            raise ValueError(f"it is damaged at byte {reading.stop}")
        return BufferSnapshot(
            rollouts=tuple(map(_restored, stored)),
            counts=state["counts"],
            stream_s=state["stream_s"],
            position={int(partition): offset for partition, offset in state["position"].items()},
        )
    except NoJournal as error:
        raise StoreError(
            f"{directory} contains no {FILE}; nothing was saved there, so fill the buffer from the log"
        ) from error
    except (KeyError, ValueError, TypeError, AttributeError, RecordError) as error:
        raise StoreError(
            f"{path} is not a valid rollout buffer ({error}); restore it from a copy, or fill the buffer from the log "
            "again"
        ) from error


def _restored(stored: _Stored) -> SnapshotRollout:
    advantage = np.frombuffer(stored.advantage, "<f4") if isinstance(stored.advantage, bytes) else stored.advantage
    return SnapshotRollout(
        decode_as(Rollout, stored.rollout), advantage, stored.usage_count, stored.weight_step, stored.timestamp
    )
