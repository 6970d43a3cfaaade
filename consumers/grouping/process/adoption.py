"""Adoption of a journal that was restored from an archive: it is bound to the new topics of the run.

A journal names its topic by Kafka's topic id, so that grouping never continues on the rollouts of another topic. The
operator declares that the new topics have the same content as the old topics; this is checked as far as possible.
"""

from collections.abc import Mapping
from dataclasses import replace

from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end, record_before
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import NO_OFFSETS, JournalRecord, batch_numbers
from rollstream.topics.wire.catalogue import name_in_run, topic_name
from rollstream.topics.wire.keys import decode_key


def adopted(kafka: KafkaConfig, run: str, record: JournalRecord, topic_id: str) -> JournalRecord:
    """Return the journal record that follows `record` and only changes the topic's id to `topic_id`.

    Raises StateRefused if the topic does not hold all offsets that the journal refers to.
    """
    rollouts, partition = topic_name(run, "rollouts"), record.partition
    begin, end = topic_admin.bounds(kafka, rollouts, [partition])[partition]
    if not begin <= record.watermark <= record.position <= end:
        raise StateRefused(
            f"{rollouts}[{partition}] holds offsets {begin} to {end - 1}, but its journal was written for "
            f"{record.watermark} to {record.position - 1}; restore the run from its archive"
        )
    before = record_before(kafka, rollouts, partition, record.position)
    epoch = None if before is None else before.leader_epoch
    return replace(
        record,
        sequence=record.sequence + 1,
        topic_id=topic_id,
        begin=record.position,
        admitted=NO_OFFSETS,
        finished=(),
        drops=(),
        finished_groups=(),
        batch_ids=(),
        snapshot=False,
        unfinished=NO_OFFSETS,
        delivered=NO_OFFSETS,
        part=0,
        parts=1,
        leader_epoch=-1 if epoch is None else epoch,
    )


def check_nothing_beyond(kafka: KafkaConfig, run: str, journal: Mapping[int, JournalRecord]) -> None:
    """Raise StateRefused if there are batches or dead letters newer than the last journal record of their partition.

    The archive was then made while a grouping process was writing, and grouping would write these records again.
    """
    skipped = SkippedRecords("adopt")
    for message in read_to_end(kafka, topic_name(run, "batches")):
        with skipped.passing(message):
            partition, number = batch_numbers(str((*decode_key(message.key), "")[0]))
            if partition in journal and number >= journal[partition].batch_number:
                raise _beyond(run, f"batch {partition}-{number}")
    for message in read_to_end(kafka, topic_name(run, "dead-letters")):
        names = ("topic", "partition", "offset")
        topic, *place = (message.header(f"__streams.errors.{name}") or "" for name in names)
        source, offset = map(decimal_number, place)
        if name_in_run(topic) == "rollouts" and source is not None and offset is not None:
            last = journal.get(source)
            if last is not None and offset >= last.position:
                raise _beyond(run, f"the dead letter of rollouts[{source}] offset {offset}")


def _beyond(run: str, what: str) -> StateRefused:
    return StateRefused(
        f"run {run} holds {what}, which its journal does not contain: it was archived while grouping was running. "
        f"Archive it again after its grouping processes have ended, and restore it into a run of another name"
    )
