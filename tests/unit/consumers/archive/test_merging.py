"""Merging of small files: a few times for each row, in pieces, and while others read."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from random import Random

import pyarrow as pa
import pytest

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive import writer as writing
from rollstream.consumers.archive.manifest import LOG
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import MOST_SMALL, ArchiveWriter, check_digests, check_files, records
from rollstream.topics.errors import StateRefused
from tests.support.archiving import StoppingStore, entry
from tests.support.paths import ROOT


def test_an_archive_that_grows_for_long_has_few_files_and_writes_a_row_again_a_few_times() -> None:
    store, commits = StoppingStore(), 400
    writer = ArchiveWriter(store, "main")
    writer.begin("rollouts", "id", {0: 0})
    random = Random(1)
    again = most = 0
    for offset in range(commits):
        writer.add(entry(0, offset, "none")._replace(value=random.randbytes(4096)))
        before = writer.commit({("rollouts", 0): offset + 1}).files
        writer.compact(gradually=True)
        again += sum(f.rows for f in writer.manifest.files_of(LOG) if f not in before)
        most = max(most, len(writer.manifest.files_of(LOG)))
    assert len(list(records(store, writer.manifest, "rollouts", 0))) == commits
    assert most < 2 * MOST_SMALL
    # If each merge took all files, this would be 13.
    assert again / commits < 8


def test_files_are_merged_in_pieces_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.consumers.archive.tables.PIECE_BYTES", 10_000)
    random = Random(1)
    log = [entry(0, offset, "none")._replace(value=random.randbytes(1000)) for offset in range(200)]
    store = StoppingStore()
    writer = ArchiveWriter(store, "main")
    writer.begin("rollouts", "id", {0: 0})
    for part in (log[:100], log[100:]):
        for record in part:
            writer.add(record)
        writer.commit({("rollouts", 0): part[-1].offset + 1})
    decoded: list[int] = []
    parquet = writing.parquet

    def watched(tables: Iterable[pa.Table], schema: pa.Schema) -> tuple[bytes, int]:
        pieces = [*tables]
        decoded.extend(piece.nbytes for piece in pieces)
        return parquet(pieces, schema)

    monkeypatch.setattr(writing, "parquet", watched)
    assert writer.compact() == 1
    assert list(records(store, writer.manifest, "rollouts", 0)) == log
    assert max(decoded) < 20_000 < sum(decoded)


def grown(store: StoppingStore, log: list[ArchivedRecord]) -> ArchiveWriter:
    """Archive these records, each in a commit, and so in files, of its own."""
    writer = ArchiveWriter(store, "main")
    writer.begin("rollouts", "id", {0: 0})
    for record in log:
        writer.add(record)
        writer.commit({("rollouts", 0): record.offset + 1})
    return writer


def test_readers_of_an_earlier_manifest_go_on_with_the_files_that_a_merge_left() -> None:
    store, log = StoppingStore(), [entry(0, offset) for offset in range(9)]
    before = grown(store, log[:6]).manifest
    reading = records(store, before, "rollouts", 0)
    assert next(reading) == log[0]
    writer = ArchiveWriter(store, "main")
    for record in log[6:]:
        writer.add(record)
        writer.commit({("rollouts", 0): record.offset + 1})
    assert writer.compact()
    assert {file.path for file in before.files}.isdisjoint(store.objects)

    assert list(reading) == log[1:6], "and nothing that the archive has gained"
    assert list(records(store, before, "rollouts", 0, 4)) == log[4:6]
    assert check_files(store, before) == writer.manifest
    assert check_digests(store, before, {LOG}) == writer.manifest
    [merged] = writer.manifest.files_of(LOG)
    del store.objects[merged.path]
    for read in (
        lambda: check_files(store, before),
        lambda: check_digests(store, before, {LOG}),
        lambda: list(records(store, before, "rollouts", 0)),
    ):
        with pytest.raises(StateRefused, match=f"{merged.path} is missing, but the archive's manifest names it"):
            read()


class MergedMeanwhile(StoppingStore):
    """A store whose archive is merged just before a read, and which remembers the other reads."""

    reads_left = -1

    def __init__(self) -> None:
        super().__init__()
        self.read_names: list[str] = []

    def read(self, name: str) -> bytes:
        self.reads_left -= 1
        if self.reads_left == 0:
            before = list(self.read_names)
            ArchiveWriter(self, "main").compact()
            self.read_names = before
        data = super().read(name)
        self.read_names.append(name)
        return data


@pytest.mark.parametrize("read", [1, 18])
def test_files_are_checked_once_each_though_they_are_merged_meanwhile(read: int) -> None:
    store = MergedMeanwhile()
    before = grown(store, [entry(0, offset) for offset in range(6)]).manifest
    store.reads_left, store.read_names = read, []
    current = check_files(store, before)
    assert current == manifests.newest(store, "main")
    assert len(current.files) < len(before.files)
    reads = Counter(name for name in store.read_names if name.endswith(".parquet"))
    assert set(reads) >= {file.path for file in current.files}
    assert max(reads.values()) == 1


READING = """
import threading
import psutil
from rollstream.consumers.archive.writer import ArchiveWriter, check_files, records
from tests.support.archiving import StoppingStore, entry

def native_threads():
    return psutil.Process().num_threads() - threading.active_count()

store = StoppingStore()
writer = ArchiveWriter(store, "main")
writer.begin("rollouts", "id", {0: 0})
before = native_threads()
for offset in range(20):
    writer.add(entry(0, offset, "none"))
    writer.commit({("rollouts", 0): offset + 1})
assert writer.compact()
assert check_files(store, writer.manifest) == writer.manifest
assert len(list(records(store, writer.manifest, "rollouts", 0))) == 20
print(native_threads() - before)
"""


def test_reading_and_merging_files_starts_no_thread_of_arrow_which_may_abort_the_process_at_its_exit() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-c", READING], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) == 0
