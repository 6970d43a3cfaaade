"""The counts of one partition's journal, added up over its records.

A record holds the entries that changed, with their sums since the start of the run. Snapshots hold every entry, and so
do records of core versions below 3.
"""

from topics.records import FateCount, JournalRecord

CHANGES_SINCE = 3
"""Core version whose records, but for snapshots, hold only the entries that changed."""


def holds_all(record: JournalRecord) -> bool:
    """Whether a record holds every entry of the counts."""
    return record.snapshot or record.core_version < CHANGES_SINCE


class JournalCounts:
    """Counts as of the newest record added. They are whole once a record was added that holds every entry."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], FateCount] = {}
        self._produced: dict[tuple[str, str], FateCount] = {}

    def add(self, record: JournalRecord) -> None:
        """Take in the next record; those of one partition come in order."""
        for table, entries in ((self._counts, record.counts), (self._produced, record.produced)):
            if holds_all(record):
                table.clear()
            table.update(((entry.environment, entry.fate), entry) for entry in entries)

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Records that have their fate, by environment and fate."""
        return _in_order(self._counts)

    @property
    def produced(self) -> tuple[FateCount, ...]:
        """Records read that were meant as rollouts, by environment."""
        return _in_order(self._produced)


def _in_order(table: dict[tuple[str, str], FateCount]) -> tuple[FateCount, ...]:
    return tuple(table[key] for key in sorted(table))
