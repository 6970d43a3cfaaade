"""Rows of an index from records of `rollouts`: a row for each offset, whatever the record is. Pure."""

import math
from typing import NamedTuple

from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.records import UNREADABLE, KafkaRecord
from rollstream.topics.records import GroupCancelled, Mark, Rollout, Turn
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.validation import REWARD_LIMIT

PREVIEW = 200
"""Maximum number of characters of a rollout that lists show."""
TEXT = 4000
"""Maximum number of characters of a rollout that can be searched: half from its beginning, half from its end."""
_EPOCH_MS = 1_577_836_800_000
"""2020-01-01, from which ids count milliseconds."""
_LAST_MS = 2**41 - 2**32
_PARTITION_BITS, _TIE_BITS = 12, 10


class RolloutRow(NamedTuple):
    """One record of `rollouts` for the index."""

    rollout: Rollout | None
    """None for marks, cancellations and records that cannot be decoded."""
    preview: str
    text: str
    environment: str | None = None
    example: str | None = None
    version: int | None = None


def row_of(message: KafkaRecord) -> RolloutRow:
    """Return the row that the index keeps for a record; the row of a bad record says what is wrong."""
    try:
        if message.value is None:
            raise RecordError("no value" if message.readable else UNREADABLE)
        record = decode(message.value)
    except RecordError as error:
        return RolloutRow(None, clipped(str(error)), "")
    if isinstance(record, Rollout):
        text = searchable(record.turns)
        return RolloutRow(record, preview_of(record.turns), text, record.environment, record.example_id)
    if isinstance(record, GroupCancelled):
        preview = clipped(f"cancels {', '.join(record.uids[:20])}: {record.reason}")
        return RolloutRow(None, preview, "", record.environment, record.example_id, record.policy_version)
    if isinstance(record, Mark):
        return RolloutRow(None, f"mark {record.kind}", "", None, None, record.policy_version)
    return RolloutRow(None, f"a {type(record).__name__}, which does not belong here", "")


def preview_of(turns: tuple[Turn, ...]) -> str:
    """Return the last turn of the model, or the last turn if the model has none, on one line."""
    spoken = [turn for turn in turns if turn.role == "assistant"] or turns
    return clipped(spoken[-1].text) if spoken else ""


def searchable(turns: tuple[Turn, ...]) -> str:
    """Return the text by which a rollout can be searched."""
    text = "\n".join(turn.text for turn in turns)
    return text if len(text) <= TEXT else f"{text[: TEXT // 2]}\n{text[-(TEXT // 2) :]}"


def clipped(text: str) -> str:
    """Return a text on one line, cut to `PREVIEW` characters."""
    line = " ".join(text[: 4 * PREVIEW].split())
    return line if len(line) <= PREVIEW else line[: PREVIEW - 1] + "…"


def group_name(rollout: Rollout) -> str:
    """Return the name of a rollout's group, as grouping and lineage write it."""
    suffix = f"/{rollout.group_id}" if rollout.group_id else ""
    return f"{rollout.environment}/{rollout.example_id}@{rollout.policy_version}{suffix}"


def finite(value: float | None) -> float | None:
    """Return the number if JSON can express it, else None."""
    return value if value is not None and math.isfinite(value) else None


class Clock:
    """Ids of the records of a partition. They rise with the append time and depend only on the partition's records."""

    def __init__(self, partition: int, last_ms: int = 0, repeated: int = 0) -> None:
        if partition >= 1 << _PARTITION_BITS:
            raise ValueError(
                f"partition {partition} is too high: an index has room for {1 << _PARTITION_BITS} partitions"
            )
        self._partition = partition
        self.last_ms, self.repeated = last_ms, repeated

    def next(self, time_ms: int) -> int:
        """Return the id of the next record."""
        at = max(self.last_ms, min(max(time_ms - _EPOCH_MS, 0), _LAST_MS))
        self.repeated = self.repeated + 1 if at == self.last_ms else 0
        if self.repeated >> _TIE_BITS:
            at, self.repeated = at + 1, 0
        self.last_ms = at
        return (((at << _PARTITION_BITS) | self._partition) << _TIE_BITS) | self.repeated


def time_of(row_id: int) -> int:
    """Return the append time in an id, in milliseconds since the epoch."""
    return (row_id >> (_PARTITION_BITS + _TIE_BITS)) + _EPOCH_MS


def first_id_at(time_ms: int) -> int:
    """Return the lowest id that a record of this time can have."""
    return max(time_ms - _EPOCH_MS, 0) << (_PARTITION_BITS + _TIE_BITS)


def sampled_of(rollout: Rollout) -> int:
    """Return the number of tokens that the policy sampled."""
    return len(rollout.loss_mask) - rollout.loss_mask.tobytes().count(0)


class RolloutValues(NamedTuple):
    """Columns of a rollout that depend on no other table."""

    version: int
    lowest: int
    highest: int
    reward: float | None
    length: int
    sampled: int
    truncated: int


def values_of(rollout: Rollout) -> RolloutValues:
    """Return the columns of a rollout. A reward beyond the limit of grouping is left out, because sums of squares would
    overflow."""
    return RolloutValues(
        rollout.policy_version,
        rollout.lowest_version,
        rollout.highest_version,
        rollout.reward if abs(rollout.reward) <= REWARD_LIMIT else None,
        len(rollout.tokens),
        sampled_of(rollout),
        int(rollout.truncated),
    )
