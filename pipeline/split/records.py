"""Writes the record of a split to `control` of the run that ends, and of its successor."""

from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.records import RunSplit
from rollstream.topics.run_splits import PREDECESSOR_KEY, SUCCESSOR_KEY


def write_to_predecessor(kafka: KafkaConfig, split: RunSplit) -> None:
    """Record a split in the run that ends."""
    _write(kafka, split.run, SUCCESSOR_KEY, encode(split))


def write_to_successor(kafka: KafkaConfig, split: RunSplit) -> None:
    """Record a split in the successor."""
    _write(kafka, split.successor, PREDECESSOR_KEY, encode(split))


def withdraw(kafka: KafkaConfig, split: RunSplit) -> None:
    """Remove the record of a split from the run that it would have ended. Call it only before anything is moved."""
    _write(kafka, split.run, SUCCESSOR_KEY, None)


def _write(kafka: KafkaConfig, run: str, key: bytes, value: bytes | None) -> None:
    with Sender(clients.producer(kafka)) as sender:
        sender.send(topic_name(run, "control"), value, key, partition=0, name="the split")
