"""Ranges of offsets by fate, from a live ledger. Each record that grouping has read has one fate or is in flight."""

from collections.abc import Mapping

from rollstream.pipeline.audit.ledger import LiveLedger
from rollstream.pipeline.index.fates import IN_FLIGHT, UNREAD
from rollstream.topics.records.fates import BATCHED, CONTROL, DEAD_LETTERED, DROPPED
from rollstream.topics.records.journal import OffsetRange

FATES = (IN_FLIGHT, UNREAD, BATCHED, DROPPED, DEAD_LETTERED, CONTROL)


def place_of(name: str) -> tuple[int, int]:
    """Return the partition and the last offset of a range, which order ranges also when their offsets have other fates
    by now. Raises ConfigurationError if `name` is no range."""
    named = OffsetRange.parse(name)
    return named.partition, named.last


def ranges_of(
    books: LiveLedger, bounds: Mapping[int, tuple[int, int]], fate: str, reason: str | None = None
) -> list[OffsetRange]:
    """Return, in order, the ranges of offsets that have a fate, or were dropped for a reason, as of the ledger's last
    poll. `bounds` has the first offset and the end of each partition of `rollouts`."""
    if fate == UNREAD:
        begins = {partition: max(books.positions.get(partition, low), low) for partition, (low, _) in bounds.items()}
        ranges = {partition: [(begins[partition], end - 1)] for partition, (_, end) in bounds.items()}
    else:
        ranges = books.offsets(fate, reason)
    return [
        OffsetRange(partition, first, last)
        for partition in sorted(bounds)
        for first, last in ranges.get(partition, ())
        if first <= last
    ]
