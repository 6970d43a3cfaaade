"""Records that a reader skips: each is counted, and reported by topic, partition and offset; none stops the reader.

One bad record (foreign bytes, an unexpected tombstone, or a well-formed record with invalid content) must not stop a
reader of a topic. Skipped records show in the log, in the reader's metrics and in the reports of tools.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.records import UNREADABLE, KafkaRecord
from rollstream.topics.logs import event
from rollstream.topics.records import JournalRecord
from rollstream.topics.wire.catalogue import name_in_run, spec_of
from rollstream.topics.wire.codec import decode_as, record_types
from rollstream.topics.wire.validation import decode_journal

logger = logging.getLogger(__name__)
R = TypeVar("R")
_EACH_UP_TO = 100
_THEN_EVERY = 1000
_KEPT = 1000


class Skipped(NamedTuple):
    """One skipped record."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    error: str

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] offset {self.offset}: {self.error}"


class SkippedRecords:
    """Records that one reader skipped. `reader` is its name in the log, for example `grouper-exp-0`."""

    def __init__(self, reader: str = "", *, logged: bool = True) -> None:
        """`logged` is False if the reader reports its skipped records itself, as tools do when they end."""
        self._reader, self._logged = reader, logged
        self.counts: Counter[str] = Counter()
        """Number of skipped records by full name of the topic."""
        self.first: list[Skipped] = []
        """The first thousand skipped records."""
        self._first_of: dict[str, Skipped] = {}

    @property
    def total(self) -> int:
        """Number of skipped records."""
        return self.counts.total()

    def decode(self, cls: type[R], message: KafkaRecord) -> R | None:
        """Decode the record of a message; counts, reports and returns None if it is not a `cls` or has no value."""
        with self.passing(message):
            if message.value is None:
                raise RecordError("a tombstone instead of a record" if message.readable else UNREADABLE)
            if cls is JournalRecord:
                return cast(R, decode_journal(message.value))
            return decode_as(cls, message.value)
        return None

    def record(self, message: KafkaRecord) -> Any:
        """Decode as `decode` does; the catalogue says of which kind the records of the message's topic are."""
        [kind] = spec_of(name_in_run(message.topic)).values
        return self.decode(record_types()[kind], message)

    def records(self, cls: type[R], messages: Iterable[KafkaRecord]) -> Iterator[tuple[KafkaRecord, R]]:
        """Yield each message with its record, without those that `decode` skips."""
        for message in messages:
            record = self.decode(cls, message)
            if record is not None:
                yield message, record

    @contextmanager
    def passing(self, message: KafkaRecord) -> Iterator[None]:
        """Skip the message if the block raises RecordError, for example for an invalid key or value."""
        try:
            yield
        except RecordError as error:
            self.skip(message, str(error))

    def skip(self, message: KafkaRecord, error: str) -> None:
        """Count a message as skipped, and log it: each of the first hundred of a topic, then every thousandth."""
        self.note(Skipped(message.topic, message.partition, message.offset, error))

    def note(self, skipped: Skipped) -> None:
        """Count and log a skipped record whose message is not available."""
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

    def add(self, count: int, first: Skipped) -> None:
        """Add records of one partition that were skipped before; `first` is the first of them."""
        self.counts[first.topic] += count
        self._first_of[first.topic] = min(self._first_of.get(first.topic, first), first)

    def merge(self, other: "SkippedRecords") -> None:
        """Add records that were skipped elsewhere, for example by another process."""
        self.counts.update(other.counts)
        self.first += other.first[: _KEPT - len(self.first)]
        for topic, skipped in other._first_of.items():
            self._first_of[topic] = min(self._first_of.get(topic, skipped), skipped)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Number of skipped records by topic, and the skipped record that is first by partition and offset."""
        return {
            topic: {"records": count, **self._first_of[topic]._asdict()} for topic, count in sorted(self.counts.items())
        }

    def lines(self) -> list[str]:
        """Lines of text for people, one for each topic."""
        counts = sorted(self.counts.items())
        return [
            f"skipped {count:,} of the records of {topic}, the first: {self._first_of[topic]}"
            for topic, count in counts
        ]
