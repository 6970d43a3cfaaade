"""Records that a reader passes over: none of them ends it; each is counted, and named by topic, partition and offset.

One bad record, foreign bytes, a tombstone where none belongs, or a sound record that makes no sense, must not stop
whoever follows a topic. What is skipped shows in the log, in the reader's figures and in the reports of tools.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import Message

from topics import clients
from topics.codec import decode_as
from topics.errors import RecordError
from topics.logs import event

logger = logging.getLogger(__name__)
R = TypeVar("R")
_EACH_UP_TO = 100
_THEN_EVERY = 1000
_KEPT = 1000


class Skipped(NamedTuple):
    """One record that was passed over."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    error: str

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] offset {self.offset}: {self.error}"


class SkippedRecords:
    """What one reader passed over. `reader` is what the log calls it, for example `grouper-exp-0`."""

    def __init__(self, reader: str = "", *, logged: bool = True) -> None:
        """`logged` is False where the reader says itself what it passed over, as tools do when they end."""
        self._reader, self._logged = reader, logged
        self.counts: Counter[str] = Counter()
        """By full name of the topic."""
        self.first: list[Skipped] = []
        """The first thousand of them."""
        self._first_of: dict[str, Skipped] = {}

    @property
    def total(self) -> int:
        """How many were passed over."""
        return self.counts.total()

    def decode(self, cls: type[R], message: Message) -> R | None:
        """The record of a message; None where it is no `cls` or has no value, which is counted and reported."""
        with self.passing(message):
            if message.value() is None:
                # The stand-in for a record that cannot be decompressed has no time.
                tombstone = message.timestamp()[1] != -1
                raise RecordError("a tombstone, where a record belongs" if tombstone else clients.UNREADABLE)
            return decode_as(cls, message.value())
        return None

    def records(self, cls: type[R], messages: Iterable[Message]) -> Iterator[tuple[Message, R]]:
        """Each message with its record, without those that `decode` passes over."""
        for message in messages:
            record = self.decode(cls, message)
            if record is not None:
                yield message, record

    @contextmanager
    def passing(self, message: Message) -> Iterator[None]:
        """Pass over the message if the block raises RecordError: a key that is none, a value that makes no sense."""
        try:
            yield
        except RecordError as error:
            self.skip(message, str(error))

    def skip(self, message: Message, error: str) -> None:
        """Count a message as passed over, and say so: of each of the first hundred of a topic, then of some."""
        self.note(Skipped(message.topic() or "", message.partition() or 0, message.offset() or 0, error))

    def note(self, skipped: Skipped) -> None:
        """The same of a record that is no message any more."""
        self.counts[skipped.topic] += 1
        self._first_of[skipped.topic] = min(self._first_of.get(skipped.topic, skipped), skipped)
        if len(self.first) < _KEPT:
            self.first.append(skipped)
        count = self.counts[skipped.topic]
        if self._logged and (count <= _EACH_UP_TO or count % _THEN_EVERY == 0):
            event(
                logger,
                "record_skipped",
                level=logging.WARNING,
                reader=self._reader,
                **skipped._asdict(),
                skipped=count,
            )

    def merge(self, other: "SkippedRecords") -> None:
        """Take in what was passed over elsewhere, by another process for example."""
        self.counts.update(other.counts)
        self.first += other.first[: _KEPT - len(self.first)]
        for topic, skipped in other._first_of.items():
            self._first_of[topic] = min(self._first_of.get(topic, skipped), skipped)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """By topic how many were passed over, and the first of them by partition and offset."""
        return {
            topic: {"records": count, **self._first_of[topic]._asdict()} for topic, count in sorted(self.counts.items())
        }

    def lines(self) -> list[str]:
        """The same for people, a line for each topic."""
        counts = sorted(self.counts.items())
        return [f"passed over {count:,} of {topic}, the first: {self._first_of[topic]}" for topic, count in counts]
