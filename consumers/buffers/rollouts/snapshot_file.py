"""The file of a saved rollout buffer: a journal that is written at once, atomically; reading it runs no code.

Its first record has position, random state and counts; each further record is a rollout in its wire format (Avro), with
its advantage and number of draws.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollstream.consumers.buffers.storage.journal import NoJournal, read_journal, write_journal
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
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


class _Head(msgspec.Struct, array_like=True, frozen=True, tag="h"):
    rollouts: int
    counts: Mapping[str, int]
    stream_s: float
    position: Mapping[int, int]


class _Stored(msgspec.Struct, array_like=True, frozen=True, tag="r"):
    rollout: bytes
    advantage: float | bytes
    usage_count: int
    weight_step: int
    timestamp: float


_DECODER: msgspec.msgpack.Decoder[_Head | _Stored] = msgspec.msgpack.Decoder(_Head | _Stored)


def save_rollouts(directory: Path, snapshot: BufferSnapshot) -> None:
    """Write the file of a buffer, and replace any earlier one. Raises StoreError."""
    head = _Head(len(snapshot.rollouts), snapshot.counts, float(snapshot.stream_s), snapshot.position)
    write_journal(directory / FILE, head, *map(_stored, snapshot.rollouts))


def load_rollouts(directory: Path) -> BufferSnapshot:
    """Read the file of a buffer. Raises StoreError if it is missing, damaged, or written by another program."""
    path = directory / FILE
    try:
        reading = read_journal(path, _DECODER)
        head = next((record for record in reading.records if isinstance(record, _Head)), None)
        stored = [record for record in reading.records if isinstance(record, _Stored)]
        if reading.damaged or head is None or len(stored) != head.rollouts:
            raise ValueError(f"it is damaged at byte {reading.stop}")
        return BufferSnapshot(
            rollouts=tuple(map(_restored, stored)),
            counts=head.counts,
            stream_s=head.stream_s,
            position=head.position,
        )
    except NoJournal as error:
        raise StoreError(
            f"{directory} contains no {FILE}; nothing was saved there, so fill the buffer from the log"
        ) from error
    except (ValueError, RecordError) as error:
        raise StoreError(
            f"{path} is not a valid rollout buffer ({error}); restore it from a copy, or fill the buffer from the log "
            "again"
        ) from error


def _stored(held: SnapshotRollout) -> _Stored:
    advantage = float(held.advantage) if isinstance(held.advantage, float) else held.advantage.tobytes()
    return _Stored(encode(held.rollout), advantage, held.usage_count, int(held.weight_step), float(held.timestamp))


def _restored(stored: _Stored) -> SnapshotRollout:
    advantage = np.frombuffer(stored.advantage, "<f4") if isinstance(stored.advantage, bytes) else stored.advantage
    return SnapshotRollout(
        decode_as(Rollout, stored.rollout), advantage, stored.usage_count, stored.weight_step, stored.timestamp
    )
