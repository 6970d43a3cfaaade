"""Sums the counts in the journal of one partition.

A record holds the entries that changed, with their sums since the start of the run. Snapshots hold every entry.
"""

from rollstream.topics.records import FateCount, JournalRecord


class JournalCounts:
    """Counts as of the newest record added; they are complete once a record that holds every entry has been added."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], FateCount] = {}
        self._produced: dict[tuple[str, str], FateCount] = {}

    def add(self, record: JournalRecord) -> None:
        """Add the next record of the partition."""
        for table, entries in ((self._counts, record.counts), (self._produced, record.produced)):
            if record.snapshot:
                table.clear()
            table.update(((entry.environment, entry.fate), entry) for entry in entries)

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Counts of finished records, by environment and fate."""
        return _in_order(self._counts)

    @property
    def produced(self) -> tuple[FateCount, ...]:
        """Counts of all records read, except valid marks and cancellations, by environment."""
        return _in_order(self._produced)


def _in_order(table: dict[tuple[str, str], FateCount]) -> tuple[FateCount, ...]:
    return tuple(table[key] for key in sorted(table))
