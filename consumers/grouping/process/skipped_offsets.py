"""Records left out unread: the remedy for a record that ends the process of its partition at every start.

An operator requests a skip on `control`, which a task reads when it starts; a skip does not undo a record already read.
The transaction that moves past the offsets writes them to the journal, as drops `skipped` with the reason. Restoring,
replaying and verifying therefore leave out the same offsets, regardless of later requests, and never fetch the records.
"""

import time
from contextlib import suppress

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.effects import OffsetSkip
from rollstream.consumers.grouping.process.bootstrap import committed_offset
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import decode_as, encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError, StateRefused, TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.keys import encode_key
from rollstream.topics.offset_ranges import OffsetRange, from_ranges
from rollstream.topics.records import JournalRecord, SkippedOffset

_TIMEOUT_S = 30.0
REASON_LIMIT = 300
"""Largest number of characters of a reason."""
OFFSETS_LIMIT = 100_000
"""Largest number of offsets in one request, because each offset becomes a drop in the journal."""


def asked_for(kafka: KafkaConfig, run: str, partition: int, reader: Reader | None = None) -> dict[int, OffsetSkip]:
    """Return the offsets of a partition of `rollouts` that are to be left out unread, with the reasons.

    An existing `reader` may be passed.
    """
    return requests_of(kafka, run, reader).get(partition, {})


def never_fetched(kafka: KafkaConfig, run: str, *, ahead: bool = True) -> dict[int, set[int]]:
    """Return the offsets of `rollouts` that grouping left out, by partition, so that other readers do not fetch them.

    `ahead` adds the requested offsets that grouping has not reached; grouping may still read them until its task
    restarts. A request for a record that was already read changes nothing. Nothing is left out of a run without the
    topics `control` and `journal`.
    """
    left_out: dict[int, set[int]] = {}
    with suppress(TopicError):
        requests = requests_of(kafka, run)
        journal = topic_name(run, "journal")
        for partition in requests.keys() & set(range(topic_admin.partitions_of(kafka, journal) if requests else 0)):
            messages = read_to_end(kafka, journal, partitions=[partition])
            hopped: set[int] = set()
            position = 0
            for _message, record in SkippedRecords(logged=False).records(JournalRecord, messages):
                hopped.update(from_ranges(record.hopped))
                position = record.position
            requested = requests[partition]
            left_out[partition] = {o for o in requested if o in hopped or (ahead and o >= position)}
    return left_out


def requests_of(kafka: KafkaConfig, run: str, reader: Reader | None = None) -> dict[int, dict[int, OffsetSkip]]:
    """Return the skip requests on `control`, by partition and offset. An existing `reader` may be passed."""
    requests: dict[int, dict[int, OffsetSkip]] = {}
    for message in read_to_end(kafka, topic_name(run, "control"), reader=reader):
        for partition, skips in note_request(message).items():
            requests.setdefault(partition, {}).update(skips)
    return requests


def note_request(message: KafkaRecord) -> dict[int, dict[int, OffsetSkip]]:
    """Return the request in a record of `control`, by partition and offset; nothing for other kinds of records."""
    try:
        record = decode_as(SkippedOffset, message.value)
    except RecordError:
        return {}  # another kind of record, or an invalid one
    if record.offset < 0 or record.count > OFFSETS_LIMIT:
        return {}
    skip = OffsetSkip(record.reason[:REASON_LIMIT])
    return {record.partition: dict.fromkeys(range(record.offset, record.offset + record.count), skip)}


def ask(kafka: KafkaConfig, run: str, grouper: GrouperConfig, place: str, reason: str) -> SkippedOffset:
    """Request that the task of a partition skips records after its next start.

    `place` is PARTITION:OFFSET or PARTITION:FIRST-LAST. Raises ConfigurationError for an invalid place or reason, and
    StateRefused if one of the records was already read.
    """
    partition, first, last = OffsetRange.parse(place)
    if last - first >= OFFSETS_LIMIT:
        raise ConfigurationError(f"{place} is more than {OFFSETS_LIMIT} offsets; skip them in several ranges")
    if not 0 < len(reason.strip()) <= REASON_LIMIT:
        raise ConfigurationError(
            f"give a reason with --reason, in 1 to {REASON_LIMIT} characters: the reason is recorded"
        )
    clients.check_broker(kafka)
    topic = topic_name(run, "rollouts")
    wanted = SkippedOffset(
        partition=partition, offset=first, reason=reason.strip(), wall_time=time.time(), count=last - first + 1
    )
    bounds = topic_admin.bounds(kafka, topic)
    if wanted.partition not in bounds:
        raise ConfigurationError(f"{topic} has partitions 0 to {len(bounds) - 1}, but no {wanted.partition}")
    _begin, end = bounds[wanted.partition]
    if last >= end:
        raise ConfigurationError(f"{topic}[{wanted.partition}] ends at {end}; there is no record {last} yet")
    position = committed_offset(kafka, grouper.group_id(run), topic, wanted.partition).offset
    if position > wanted.offset:
        raise StateRefused(
            f"{topic}[{wanted.partition}] was read up to {position}, so it is too late to skip {wanted.offset}; "
            f"drop groups that contain it with `rollstream steer exclude --offsets {place}`"
        )
    _write(kafka, run, wanted)
    return wanted


def _write(kafka: KafkaConfig, run: str, wanted: SkippedOffset) -> None:
    last = wanted.offset + wanted.count - 1
    range_text = f"{wanted.partition}:{wanted.offset}" + (f"-{last}" if wanted.count > 1 else "")
    with Sender(clients.producer(kafka)) as sender:
        topic, key = topic_name(run, "control"), encode_key("skip", range_text)
        sender.send(topic, encode(wanted), key, partition=0, name="the skip")
