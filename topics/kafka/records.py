"""Records for readers, which are converted here from the client's messages.

Key, value and headers may come from any program: whatever their content, the conversion never raises.
"""

import gc
from dataclasses import dataclass
from operator import methodcaller
from typing import NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, Message, TopicPartition

from rollstream.topics.errors import RecordError

BEGINNING: int = OFFSET_BEGINNING
"""Stands for the offset where a partition begins."""
COMMITTED: int = OFFSET_INVALID
"""Stands for the offset that the group has committed."""
UNREADABLE = "its batch cannot be decompressed within the consumer's limit (receive.message.max.bytes)"
"""Reason why a record is not readable."""
Place = tuple[str, int]
"""A partition: full name of its topic, and its number."""
Headers = tuple[tuple[str, bytes | None], ...]
"""Names and values in order; names may repeat."""


def size_of(key: bytes | None, value: bytes | None, headers: Headers | None) -> int:
    """Number of bytes of a record: its key, its value, and the names and values of its headers."""
    of_headers = sum(len(name.encode()) + len(header or b"") for name, header in headers or ())
    return len(key or b"") + len(value or b"") + of_headers


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """One record of a partition."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    timestamp_ms: int = -1
    """-1 if the record is not readable."""
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers | None = ()
    """None if a header's name is not UTF-8."""
    leader_epoch: int | None = None
    """Leader epoch of the batch the record is in."""
    readable: bool = True
    """False if its batch cannot be decompressed within the client's limit; it has no key and no value then."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes of key, value and headers."""
        return size_of(self.key, self.value, self.headers)

    def header_pairs(self) -> Headers:
        """Headers as they were sent. Raises RecordError if a header's name is not UTF-8."""
        if self.headers is None:
            raise RecordError("its headers cannot be read: the name of one is not UTF-8")
        return self.headers

    def header(self, name: str) -> str | None:
        """The last value of a header as text, with bytes that are not UTF-8 replaced; None if there is no value."""
        value = dict(self.headers or ()).get(name)
        return None if value is None else value.decode(errors="replace")


class GroupPosition(NamedTuple):
    """The position of a consumer group in a partition, as it is committed."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    """Next offset to be read; negative if none is committed."""
    metadata: str = ""
    leader_epoch: int = -1
    """Leader epoch of the last record read; -1 if unknown."""

    def for_client(self) -> TopicPartition:
        """Convert to the client's type."""
        return TopicPartition(self.topic, self.partition, self.offset, self.metadata, leader_epoch=self.leader_epoch)

    @classmethod
    def from_client(cls, place: TopicPartition) -> "GroupPosition":
        """Convert a committed position from the client's type."""
        epoch = place.leader_epoch
        return cls(place.topic, place.partition, place.offset, place.metadata or "", -1 if epoch is None else epoch)


def record_of(message: Message) -> KafkaRecord:
    """Convert a message without an error to a record."""
    return KafkaRecord(
        message.topic(),  # type: ignore[arg-type]
        message.partition(),  # type: ignore[arg-type]
        message.offset(),  # type: ignore[arg-type]
        message.timestamp()[1],
        message.key(),
        message.value(),
        _headers_of(message),
        message.leader_epoch(),
    )


_headers = methodcaller("headers")
"""Calls `headers` so that the interpreter notices at once if the client sets an exception and yet returns a value."""


def _headers_of(message: Message) -> Headers | None:
    try:
        pairs = _headers(message)
        if not pairs:
            return ()
        # A second call returns pairs whose first item is a null pointer; accessing it crashes the process.
        if any(len(gc.get_referents(pair)) < 2 for pair in pairs):
            return None
    except (SystemError, UnicodeDecodeError):
        return None
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)
