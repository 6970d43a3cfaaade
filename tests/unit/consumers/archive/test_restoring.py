"""Parts of archiving and restoring that hold or send records."""

from rollstream.consumers.archive.restorer import PartitionCursor
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from tests.support.archiving import StoppingStore

MIB = 1024 * 1024


def in_headers(offset: int) -> ArchivedRecord:
    """A record whose key, header's name and header's value have a MiB each; it has no value."""
    return ArchivedRecord("rollouts", 0, offset, 1, b"k" * MIB, None, (("n" * MIB, b"v" * MIB),))


def test_an_archiver_counts_all_bytes_of_the_records_that_it_holds() -> None:
    writer = ArchiveWriter(StoppingStore(), "main")
    writer.begin("rollouts", "id", {0: 0})
    writer.add(in_headers(0))
    assert 3 * MIB <= writer.buffered_bytes < 3 * MIB + 1024
    writer.close()


def test_a_restore_counts_all_bytes_of_the_records_that_it_holds() -> None:
    cursor = PartitionCursor("again", "rollouts", 0, 0, 6, map(in_headers, range(6)))
    entries, gap = cursor.next_records()
    assert (len(entries), gap) == (2, 0)
