"""Acknowledgements without an offset, as a broker may give for a record that was sent to it twice: to a role, for its
first records to some topics, or to the process of the test."""

import sys

import pytest

from rollstream.topics.kafka import sender

_SCRIPT = """
import sys
from rollstream.topics.kafka import sender

untold = {topics!r}

class Untold(sender.Delivery):
    def __new__(cls, topic, partition, offset, *times):
        name = topic.rpartition(".")[2]
        if name in untold:
            untold.remove(name)
            offset = None
        return delivery(topic, partition, offset, *times)

delivery, sender.Delivery = sender.Delivery, Untold
from rollstream.pipeline.command_line.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_first_offsets(*topics: str) -> str:
    """Return the script of a role without these offsets; a topic is named once for each record."""
    return _SCRIPT.format(topics=list(topics))


def tell_no_offsets(monkeypatch: pytest.MonkeyPatch, topic: str, records: int = sys.maxsize) -> None:
    """Hide from this process the offsets of the next records that it sends to a topic."""
    left, delivery = records, sender.Delivery

    def untold(to: str, partition: int, offset: int | None, timestamp_ms: int, stamped: bool) -> sender.Delivery:
        nonlocal left
        if to == topic and left:
            offset, left = None, left - 1
        return delivery(to, partition, offset, timestamp_ms, stamped)

    monkeypatch.setattr(sender, "Delivery", untold)
