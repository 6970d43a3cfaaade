"""What a labeler makes of one record of `unlabelled`: a trajectory for `trajectories`, nothing, or a dead letter.

Pure, as far as the labeler is. After a crash the same record is given to it again, so it should be.
"""

from collections.abc import Callable
from typing import NamedTuple

from consumers.importing import imported
from consumers.transactions import Refused
from topics.codec import decode_as, encode
from topics.errors import ConfigurationError, RecordError, RecordTooLarge
from topics.records import TrajectoryRecord
from topics.trajectories import Trajectory, from_record, to_record

Labeler = Callable[[Trajectory], Trajectory | None]
"""Gives a trajectory its rewards, or whatever it lacks; None leaves it out. Arrays it gets are read-only.

RecordError says that it cannot judge one, which becomes a dead letter. Any other error ends the stage before anything
of the trajectory is written, so that it is met again by a labeler that was mended.
"""


class Input(NamedTuple):
    """One record of `unlabelled`."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Labelled(NamedTuple):
    """A record for `trajectories`, and the offset of what it was made of."""

    offset: int
    key: bytes | None
    value: bytes


def label(labeler: Labeler, record: Input, limit_bytes: int) -> Labelled | Refused | None:
    """What a record becomes; None where the labeler left it out. Key and value have at most `limit_bytes`.

    Raises ConfigurationError for a labeler that returns another trajectory than it was given, and its own errors.
    """
    try:
        given = from_record(decode_as(TrajectoryRecord, record.value))
        made = labeler(given)
        if made is None:
            return None
        _check_same(given, made)
        value = encode(to_record(made))
        size = len(record.key or b"") + len(value)
        if size > limit_bytes:
            raise RecordTooLarge(
                f"labelled it has {size} bytes, and a record holds {limit_bytes}; collect fewer steps, or raise "
                "kafka.max_record_bytes"
            )
        return Labelled(record.offset, record.key, value)
    except RecordError as error:
        return Refused(record.topic, record.partition, record.offset, record.key, record.value, str(error))


def labeler_of(name: str) -> Labeler:
    """The function that `package.module:function` names; imports it. Raises ConfigurationError where there is none."""
    found = imported(name, "the labeler is", "one is named package.module:function")
    if not callable(found):
        raise ConfigurationError(f"the labeler is {name!r}, which is no function")
    labeler: Labeler = found
    return labeler


def _check_same(given: Trajectory, made: Trajectory) -> None:
    """Where a record lies, and who has had it, follows from these."""
    for what in ("uid", "environment"):
        if getattr(given, what) != getattr(made, what):
            raise ConfigurationError(
                f"the labeler made trajectory {made.uid!r} of {made.environment!r} of {given.uid!r} of "
                f"{given.environment!r}; change arrays only, with dataclasses.replace(trajectory, arrays=...)"
            )
    if given.metadata.worker_id != made.metadata.worker_id:
        raise ConfigurationError(f"the labeler changed the worker of trajectory {given.uid!r}; leave metadata as it is")
