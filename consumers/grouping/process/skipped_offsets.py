"""Requests to skip a record: the remedy for a record that ends the process of its partition at every start.

A request is a record on `control`, because a record of `rollouts` would come after the one to be skipped. A task reads
the requests when it is restored, and makes each requested record a dead letter without decoding it. The journal names
the offset in the same transaction. Restoring, replaying and verifying take skips from the journal only, so a request
that comes after the record was read has no effect.
"""

import time

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offset
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError, StateRefused
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.records import SkippedOffset
from rollstream.topics.records.journal import OffsetRange
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key

REASON_LIMIT = 250
"""Largest number of characters of a reason."""


def requested_skips(kafka: KafkaConfig, run: str, partition: int, reader: Reader | None = None) -> dict[int, str]:
    """Return the records of a partition of `rollouts` that are to be skipped: the reasons, by offset.

    An existing `reader` may be passed.
    """
    skips: dict[int, str] = {}
    for message in read_to_end(kafka, topic_name(run, "control"), reader=reader):
        try:
            request = decode_as(SkippedOffset, message.value)
        except RecordError:
            continue  # another kind of record, or an invalid one
        if request.partition == partition:
            skips[request.offset] = request.reason[:REASON_LIMIT]
    return skips


def request_skip(kafka: KafkaConfig, run: str, grouper: GrouperConfig, place: str, reason: str) -> SkippedOffset:
    """Request that the task of a partition skips a record, named PARTITION:OFFSET, after its next start.

    Raises ConfigurationError for an invalid place or reason, and StateRefused if the record was already read.
    """
    partition, offset, last = OffsetRange.parse(place)
    if last > offset:
        raise ConfigurationError(f"{place} is a range; skip the one record that the error of grouping names")
    if not 0 < len(reason.strip()) <= REASON_LIMIT:
        raise ConfigurationError(
            f"give a reason with --reason, in 1 to {REASON_LIMIT} characters: the reason is recorded"
        )
    clients.check_broker(kafka)
    topic = topic_name(run, "rollouts")
    bounds = topic_admin.bounds(kafka, topic)
    if partition not in bounds:
        raise ConfigurationError(f"{topic} has partitions 0 to {len(bounds) - 1}, but no {partition}")
    _begin, end = bounds[partition]
    if offset >= end:
        raise ConfigurationError(f"{topic}[{partition}] ends at {end}; there is no record {offset} yet")
    position = committed_offset(kafka, grouper.group_id(run), topic, partition).offset
    if position > offset:
        raise StateRefused(
            f"{topic}[{partition}] was read up to {position}, so it is too late to skip {offset}; "
            f"drop groups that contain it with `rollstream steer exclude --offsets {place}`"
        )
    request = SkippedOffset(partition=partition, offset=offset, reason=reason.strip(), wall_time=time.time())
    with Sender(clients.producer(kafka)) as sender:
        key = encode_key("skip", f"{partition}:{offset}")
        sender.send(topic_name(run, "control"), encode(request), key, partition=0, name="the skip")
    return request
