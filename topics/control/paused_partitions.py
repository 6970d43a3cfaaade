"""Partitions of `rollouts` that grouping does not read for a while, as recorded on the topic `control`.

A pause changes no batch: the records of a paused partition are read later, as after a stop of the grouping process.
"""

import time

from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import read_named, write
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.records import PausedPartition
from rollstream.topics.wire.catalogue import topic_name

PAUSED = "paused"
"""First part of the key of a record that pauses a partition; the second is its number."""
REASON_LIMIT = 300
"""Largest number of characters of a reason."""


def pause(kafka: KafkaConfig, run: str, partition: int, reason: str) -> None:
    """Record that grouping must stop reading a partition. Raises ConfigurationError if there is no such partition, or
    if the reason is empty or too long."""
    if not 0 < len(reason.strip()) <= REASON_LIMIT:
        raise ConfigurationError(
            f"give a reason with --reason, of 1 to {REASON_LIMIT} characters: the next operator reads it"
        )
    partitions = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
    if not 0 <= partition < partitions:
        raise ConfigurationError(f"topic rollouts of run {run} has partitions 0 to {partitions - 1}, not {partition}")
    record = PausedPartition(partition=partition, reason=reason.strip(), wall_time=time.time())
    write(kafka, run, PAUSED, {str(partition): record})


def resume(kafka: KafkaConfig, run: str, partition: int) -> None:
    """Let grouping read a partition again. Raises ConfigurationError if it is not paused."""
    paused = {record.partition for record in read_named(kafka, run, PAUSED, PausedPartition).values()}
    if partition not in paused:
        names = ", ".join(map(str, sorted(paused))) or "none"
        raise ConfigurationError(f"partition {partition} of run {run} is not paused; paused partitions: {names}")
    write(kafka, run, PAUSED, {str(partition): None})
