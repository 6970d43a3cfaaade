"""Records left out unread: the way on where reading one ends the process of its partition at every start.

Whoever operates the run asks for it on `control`, which a task reads when it starts; a record that was read already is
read. What was left out is in the journal, in the transaction that moves past it: a drop `skipped` with the reason. So
restoring, replaying and verifying leave out the same, whatever was asked for since.
"""

import re
import time

from consumers.grouping.bootstrap import committed_offsets
from consumers.grouping.config import GrouperConfig
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as, encode
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeliveryError, RecordError, StateRefused
from topics.keys import encode_key
from topics.records import SkippedOffset

_PLACE = re.compile(r"(\d{1,9}):(\d{1,18})", re.ASCII)
_TIMEOUT_S = 30.0
REASON_LIMIT = 300
"""Most characters of a reason."""


def asked_for(kafka: KafkaConfig, run: str, partition: int) -> dict[int, str]:
    """Offsets of a partition of `rollouts` that are to be left out unread, and why."""
    found = {}
    for message in clients.read_to_end(kafka, topic_name(run, "control")):
        try:
            record = decode_as(SkippedOffset, message.value())
        except RecordError:
            continue  # Of another kind, or nobody's.
        if record.partition == partition:
            found[record.offset] = record.reason[:REASON_LIMIT]
    return found


def ask(kafka: KafkaConfig, run: str, grouper: GrouperConfig, place: str, reason: str) -> SkippedOffset:
    """Have a record left out by the task of its partition when it starts again; `place` is PARTITION:OFFSET.

    Raises ConfigurationError for a place that is none or without a reason, StateRefused where the record was read.
    """
    parsed = _PLACE.fullmatch(place)
    if parsed is None:
        raise ConfigurationError(f"{place!r} names no record; write PARTITION:OFFSET, e.g. 3:1217")
    if not 0 < len(reason.strip()) <= REASON_LIMIT:
        raise ConfigurationError(f"say why with --reason, in 1 to {REASON_LIMIT} characters: it stays on the record")
    clients.check_broker(kafka)
    topic = topic_name(run, "rollouts")
    wanted = SkippedOffset(
        partition=int(parsed[1]), offset=int(parsed[2]), reason=reason.strip(), wall_time=time.time()
    )
    bounds = clients.bounds(kafka, topic)
    if wanted.partition not in bounds:
        raise ConfigurationError(f"{topic} has partitions 0 to {len(bounds) - 1}, and no {wanted.partition}")
    _begin, end = bounds[wanted.partition]
    if wanted.offset >= end:
        raise ConfigurationError(f"{topic}[{wanted.partition}] ends at {end}; there is no record {wanted.offset} yet")
    position = committed_offsets(kafka, grouper.group_id(run), topic, len(bounds))[wanted.partition].offset
    if position > wanted.offset:
        raise StateRefused(
            f"{topic}[{wanted.partition}] was read up to {position}: what offset {wanted.offset} did is on the record. "
            f"What it brought in leaves with `rollstream exclude --offsets {place}`"
        )
    _write(kafka, run, wanted)
    return wanted


def _write(kafka: KafkaConfig, run: str, wanted: SkippedOffset) -> None:
    failed: list[str] = []
    producer = clients.producer(kafka)
    clients.produce(
        producer,
        topic_name(run, "control"),
        encode(wanted),
        encode_key("skip", f"{wanted.partition}:{wanted.offset}"),
        partition=0,
        on_delivery=lambda error, _message: failed.append(error.str()) if error is not None else None,
    )
    if producer.flush(_TIMEOUT_S) or failed:
        why = failed[0] if failed else f"no answer within {_TIMEOUT_S:g} s"
        raise DeliveryError(f"the skip was not written to {topic_name(run, 'control')} ({why}); run this again")
