"""The journal of a run that was restored from an archive, made that of the topics it lies in now.

A journal names the topic it was written for by Kafka's id, so that grouping never goes on with rollouts of another.
Whoever operates the run says that these are the same; what can be seen from the topics is checked.
"""

from collections.abc import Mapping
from dataclasses import replace

from topics import clients
from topics.catalogue import name_in_run, topic_name
from topics.config import KafkaConfig
from topics.errors import StateRefused
from topics.headers import header
from topics.keys import decode_key
from topics.records import NO_OFFSETS, JournalRecord, batch_numbers
from topics.skipped import SkippedRecords


def adopted(kafka: KafkaConfig, run: str, record: JournalRecord, topic_id: str) -> JournalRecord:
    """The journal record that follows `record`, changes nothing, and names topic `topic_id`.

    Raises StateRefused where the topic ends before what the journal says was read.
    """
    rollouts, partition = topic_name(run, "rollouts"), record.partition
    begin, end = clients.bounds(kafka, rollouts, [partition])[partition]
    if not begin <= record.watermark <= record.position <= end:
        raise StateRefused(
            f"{rollouts}[{partition}] holds offsets {begin} to {end - 1}, and its journal was written for "
            f"{record.watermark} to {record.position - 1}; restore the run from its archive"
        )
    before = clients.last_before(kafka, rollouts, partition, record.position)
    epoch = None if before is None else before.leader_epoch()
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
    """Raise StateRefused where batches or dead letters are there that the last record of a partition's journal does not
    tell of: the archive was made while a grouping process wrote, and going on would make them a second time."""
    skipped = SkippedRecords("adopt")
    for message in clients.read_to_end(kafka, topic_name(run, "batches")):
        with skipped.passing(message):
            partition, number = batch_numbers(str(decode_key(message.key())[0]))
            if partition in journal and number >= journal[partition].batch_number:
                raise _beyond(run, f"batch {partition}-{number}")
    for message in clients.read_to_end(kafka, topic_name(run, "dead-letters")):
        names = ("topic", "partition", "offset")
        topic, number_of, offset = (header(message, f"__streams.errors.{name}") or "" for name in names)
        if name_in_run(topic) == "rollouts" and number_of.isdecimal() and offset.isdecimal():
            last = journal.get(int(number_of))
            if last is not None and int(offset) >= last.position:
                raise _beyond(run, f"the dead letter of rollouts[{number_of}] offset {offset}")


def _beyond(run: str, what: str) -> StateRefused:
    return StateRefused(
        f"run {run} holds {what}, of which its journal does not tell: it was archived while grouping went on. Archive "
        f"it again when its grouping processes have ended, and restore it into a run of another name"
    )
