"""The log of a partition as a broker keeps it: records, transaction markers, and what is visible of them.

Source: Kafka's protocol guide and KIP-98 (transactions), KIP-890 (a write must belong to a transaction that is open).
"""

from dataclasses import dataclass, field

from confluent_kafka import KafkaError

Headers = list[tuple[str, bytes | None]]


class Refusal(Exception):
    """A broker's error in answer to a request."""

    def __init__(self, code: int) -> None:
        super().__init__(KafkaError(code).name())
        self.code = code


@dataclass(frozen=True)
class Entry:
    """One offset: a record, or the marker that ends a transaction."""

    offset: int
    timestamp_ms: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = field(default_factory=list)
    producer_id: int = -1
    """Producer id of the transaction that the record is in; -1 if it is in none."""
    marker: str = ""
    """`commit` or `abort`; empty for a record."""


@dataclass
class PartitionLog:
    """Offsets of a partition, from 0 on."""

    entries: list[Entry] = field(default_factory=list)
    begin: int = 0
    """First offset that has not been deleted."""
    open: dict[int, int] = field(default_factory=dict)
    """First offset of each open transaction, by producer id."""
    aborted: set[int] = field(default_factory=set)
    """Offsets of records of aborted transactions."""
    sequences: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Offsets by producer id and epoch, in the order of sequence numbers: what was written already is not again."""
    _members: dict[int, list[int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Next offset."""
        return len(self.entries)

    @property
    def stable(self) -> int:
        """Last stable offset: where the oldest open transaction begins."""
        return min(self.open.values(), default=self.end)

    def append(
        self,
        now_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        producer: tuple[int, int],
        sequence: int,
        *,
        transactional: bool,
    ) -> int:
        """Append a record unless its sequence number is there already; return the offset."""
        written = self.sequences.setdefault(producer, [])
        if sequence < len(written):
            return written[sequence]
        if sequence > len(written):
            raise Refusal(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
        offset = self.end
        producer_id = producer[0] if transactional else -1
        self.entries.append(Entry(offset, now_ms, key, value, headers, producer_id))
        written.append(offset)
        if transactional:
            self.open.setdefault(producer_id, offset)
            self._members.setdefault(producer_id, []).append(offset)
        return offset

    def mark(self, now_ms: int, producer_id: int, commit: bool) -> None:
        """Write the marker that ends a producer's transaction here."""
        self.entries.append(Entry(self.end, now_ms, producer_id=producer_id, marker="commit" if commit else "abort"))
        self.open.pop(producer_id, None)
        members = self._members.pop(producer_id, [])
        if not commit:
            self.aborted.update(members)

    def visible(
        self, start: int, most: int, committed: bool, most_bytes: float = float("inf")
    ) -> tuple[list[Entry], int]:
        """Return records from an offset on, and the offset after what was looked at; a first record always fits."""
        stop = self.stable if committed else self.end
        collected: list[Entry] = []
        at = max(start, self.begin)
        size_bytes = 0
        while at < stop and len(collected) < most:
            entry = self.entries[at]
            size_bytes += len(entry.value or b"")
            if collected and size_bytes > most_bytes:
                break
            at += 1
            if not entry.marker and not (committed and entry.offset in self.aborted):
                collected.append(entry)
        return collected, max(at, start)
