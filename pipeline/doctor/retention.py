"""Checks how long brokers keep rollouts, and how old the oldest unfinished rollout of each partition is.

A restart of grouping reads from that rollout on. Unfinished rollouts that brokers delete are lost with their groups.
"""

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from rollstream.pipeline.audit.topic_reading import committed_tasks
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.doctor.findings import Finding
from rollstream.topics.errors import AccessDenied, RollstreamError
from rollstream.topics.kafka import access_control, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.catalogue import topic_name

_CHECK = "retention"
_AUDITOR = "run the check as the user audit or operate, which may see it"


@dataclass(frozen=True, kw_only=True)
class OldestUnfinished:
    """The oldest record of a partition that grouping has not finished, or not read."""

    partition: int
    offset: int
    """The watermark of the partition."""
    begin: int
    """First offset that the partition still holds."""
    age_s: float | None
    """Time since the broker stamped the record; None if there is no such record, or it is gone."""


def check_retention(config: RunConfig, flags: str = "") -> Iterator[Finding]:
    """Yield findings on unfinished rollouts that brokers may delete, or have deleted.

    The commands of the remedies end in `flags`.
    """
    keep = f"rollstream topics apply{flags}; to free space, rollstream prune{flags}"
    topic = topic_name(config.run, "rollouts")
    kept_s = topic_admin.retention_s(config.kafka, topic)
    try:
        oldest = list(oldest_unfinished(config))
    except RollstreamError as error:
        oldest = []
        yield Finding(check=_CHECK, level="note", text=f"the progress of grouping cannot be seen: {error}")
    for place in oldest:
        yield from _of_partition(topic, kept_s, place, keep)
    if kept_s is None:
        text = f"whether {topic} keeps its records cannot be seen: it is missing, or this user may not see its settings"
        yield Finding(check=_CHECK, level="note", text=text, remedy=_AUDITOR)
    elif not math.isinf(kept_s):
        yield Finding(
            check=_CHECK,
            level="fault",
            text=f"{topic} keeps records for {_hours(kept_s)} (it must keep them for ever)",
            remedy=keep,
        )
    elif not any(place.begin > place.offset for place in oldest):
        yield Finding(check=_CHECK, level="ok", text=f"{topic} keeps its records for ever")


def oldest_unfinished(config: RunConfig) -> Iterator[OldestUnfinished]:
    """Yield the oldest unfinished record of each partition of `rollouts`.

    Raises AccessDenied if this user may not see the consumer group, `journal` or `rollouts`, and StateRefused if
    grouping has no state yet.
    """
    topic, group = topic_name(config.run, "rollouts"), config.grouper.group_id(config.run)
    if access_control.group_operations(config.kafka, [group])[group] == frozenset():
        # Without this check, the client would request the offsets of such a group again and again.
        raise AccessDenied(f"this user may not Describe group {group}")
    bounds = topic_admin.bounds(config.kafka, topic)
    for partition, journal in committed_tasks(config.kafka, config.run, config.grouper):
        begin, end = bounds[partition]
        age_s = None
        if begin <= journal.watermark < end:
            start = {partition: journal.watermark}
            with closing(read_to_end(config.kafka, topic, partitions=[partition], start=start)) as records:
                record = next(records, None)
            age_s = None if record is None else max(0.0, time.time() - record.timestamp_ms / 1000)
        yield OldestUnfinished(partition=partition, offset=journal.watermark, begin=begin, age_s=age_s)


def _of_partition(topic: str, kept_s: float | None, place: OldestUnfinished, keep: str) -> Iterator[Finding]:
    where = f"{topic}[{place.partition}]"
    if place.begin > place.offset:
        yield Finding(
            check=_CHECK,
            level="fault",
            text=f"grouping has finished {where} up to offset {place.offset}, and the log begins at {place.begin}: "
            f"{place.begin - place.offset} records are gone",
            remedy="restore them from an archive into a new run (rollstream restore), or start a run of another name",
        )
    elif place.age_s is not None and kept_s is not None and not math.isinf(kept_s):
        left_s = kept_s - place.age_s
        soon = "at any time" if left_s <= 0 else f"in {_hours(left_s)}"
        yield Finding(
            check=_CHECK,
            level="fault",
            text=f"the oldest record of {where} that grouping has not finished, offset {place.offset}, is "
            f"{_hours(place.age_s)} old: brokers may delete it {soon}",
            remedy=keep,
        )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 360 else f"{seconds:.0f} s"
