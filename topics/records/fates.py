"""Fates of the records of `rollouts`, reasons of drops, and reasons for which a learner skips a rollout.

Every record that grouping has read is in flight or has one fate. The journal lists offsets by fate. Its counts name
dropped records by fate and reason, for example `dropped:late`.
"""

from typing import Literal, NamedTuple, get_args

Fate = Literal["batched", "dropped", "dead_lettered", "control"]
FATES: tuple[Fate, ...] = get_args(Fate)
BATCHED: Fate = "batched"
DROPPED: Fate = "dropped"
DEAD_LETTERED: Fate = "dead_lettered"
CONTROL: Fate = "control"

READ = "read"
"""Name under which the journal counts every record read, whatever its fate, except valid marks and cancellations."""

DropReason = Literal[
    "duplicate_uid",
    "stale_version",
    "future_version",
    "excluded",
    "too_old",
    "group_too_small",
    "zero_variance",
    "zero_advantage",
    "no_pair",
    "superseded_version",
    "late",
    "capacity",
    "quota",
    "cancelled",
    "too_large",
    "wrong_partition",
    "invalid",
]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
"""Reasons of rollstream itself; batch makers may add their own."""

OTHER_REASONS = "other"
"""Reason under which further reasons of batch makers are counted together once the counts are full."""
OTHER_ENVIRONMENTS = "(others)"
"""Environment under which further environments are counted together once the counts are full."""

REASON_LIMIT = 64
"""Largest number of characters in a drop's reason in the journal."""
DETAIL_LIMIT = 300
"""Largest number of characters in a drop's detail or a dead letter's error in the journal."""


def dropped_for(reason: str) -> str:
    """Return the name under which drops of a reason are counted."""
    return f"{DROPPED}:{reason}"


def fate_and_reason(counted: str) -> tuple[str, str]:
    """Split the name of a count into the fate and the drop reason, which is "" for other fates."""
    fate, _, reason = counted.partition(":")
    return fate, reason


def exclusion_detail(kind: str, name: str | int) -> str:
    """Return the detail of drops caused by the exclusion of an environment, a worker or an offset, not truncated."""
    return f"{kind} {name} is excluded"


def clip(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, so that names and details of records cannot outgrow the journal."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


EXCLUDED = "excluded"
UNKNOWN_VERSION = "unknown_version"
STALE_VERSION = "stale_version"
MISSING_ARRAY = "missing_array"
"""Code of a row with an array that is missing in its store, or damaged there."""
ROW_CODES = (
    *("vocabulary", "temperature", "logprobs", "advantage", "reference", "experts", "too_long", "unpaired"),
    *("media", MISSING_ARRAY),
)
"""Codes of single rows that cannot be trained on, in a batch that is used."""
ENDED = "ended"
"""Code of rollouts that a buffer held when the run ended, and that no step had drawn."""
OTHER = "other"
"""Code under which reasons without a code are counted, such as the reasons of a foreign trainer."""


class Skip(NamedTuple):
    """Why a learner skips a batch or a row."""

    code: str
    reason: str
