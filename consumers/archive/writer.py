"""ArchiveWriter: writes records to files and files to the manifest, exactly once, even if it crashes.

Records are buffered until their files are written; then a manifest names the files together with the positions after
these records. A restarted writer continues from the positions in the manifest.
"""

import hashlib
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.manifest import LOG, ArchivedFile, ArchivedTopic, ArchiveManifest, folder_of
from rollstream.consumers.archive.tables import (
    SCHEMAS,
    ArchivedRecord,
    Row,
    archived_records,
    date_at,
    log_table,
    parquet,
    refusing,
    rows_of,
    rows_of_piece,
    table_of,
)
from rollstream.consumers.freed_memory import FreedMemory
from rollstream.consumers.log_view import LogView
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.files.stored_arrays import NAMING, ArrayMissing, StoredArrays, names_in
from rollstream.topics.files.stores import ObjectMissing, Store, checked
from rollstream.topics.kafka.skipped_records import Skipped, SkippedRecords
from rollstream.topics.wire.catalogue import topic_name

TopicPartitionKey = tuple[str, int]
"""Topic and partition."""
_LONGEST_NAME = 120
_ELSEWHERE = "archive to another place"
_THREADS = 2
CONVERTED_AT_ONCE = 256
"""Number of records of a partition whose rows are made at once."""
OWN_FILES = 16
"""Number of environments that get separate files in a commit: those with the most rows. All others share a file."""
SMALL_BYTES = 16 * 1024 * 1024
"""Size below which files are merged."""
LARGE_BYTES = 128 * 1024 * 1024
"""Largest size of a merged file."""
MOST_SMALL = 16
"""Number of small files of one table, partition, environment and date at which an archiver merges the newest."""
GROWN_BYTES = 16 * 1024 * 1024
"""Growth of the process's memory at which the memory of records that have been written to files is released."""


@dataclass(frozen=True)
class _FileSpec:
    """Table, partition and offsets of a file to be written."""

    table: str
    topic: str
    partition: int
    environment: str
    """Empty if the rows of the file belong to several environments or to none."""
    date: str
    begin: int
    end: int


class ArchiveWriter:
    """The single writer of a run's archive; it takes over from the previous writer and deletes files that no manifest
    names."""

    def __init__(self, store: Store, run: str, *, arrays: bool = False) -> None:
        self._store, self._run, self._arrays = store, run, arrays
        self.manifest = manifests.take_over(store, run)
        self.swept = manifests.sweep(store, self.manifest)
        """Number of deleted files that no manifest named."""
        self.skipped = SkippedRecords("archive", logged=False)
        """Records whose value or headers are not in the archive, or that have no row in a table other than `log`."""
        self.buffered_bytes = 0
        self._entries: dict[TopicPartitionKey, list[ArchivedRecord]] = {}
        self._tables: dict[TopicPartitionKey, dict[tuple[str, str], list[pa.Table]]] = {}
        """Rows of these records, by table and date."""
        self._reached: dict[TopicPartitionKey, int] = {}
        self._freed = FreedMemory(GROWN_BYTES)
        self._pool = ThreadPoolExecutor(_THREADS)
        self._writing: tuple[list[Future[ArchivedFile]], dict[TopicPartitionKey, int]] | None = None

    def close(self) -> None:
        """End the threads; records that were not committed are not in the archive."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, topic: str, topic_id: str, first: Mapping[int, int]) -> dict[int, int]:
        """Return the offsets to read a topic from, by partition; `first` are its first offsets on the broker.

        Raises StateRefused if the topic is not the archived one, or was pruned beyond the archived offsets.
        """
        known = self.manifest.topics.get(topic)
        if known is None:
            added = ArchivedTopic(topic_id=topic_id, begin=dict(first), position=dict(first))
            self.manifest = replace(self.manifest, topics={**self.manifest.topics, topic: added})
            return dict(first)
        self.check_topic(topic, topic_id)
        if known.position.keys() < first.keys():
            raise StateRefused(
                f"{topic} has {len(first)} partitions, and {len(known.position)} are archived; {_ELSEWHERE}"
            )
        bounds = {partition: (low, sys.maxsize) for partition, low in first.items()}
        return self._view(topic).starts(topic_name(self._run, topic), bounds, _ELSEWHERE)

    def check_topic(self, topic: str, topic_id: str) -> None:
        """Raise StateRefused if a topic is not the archived one."""
        self._view(topic).check_topic(topic_name(self._run, topic), topic_id, _ELSEWHERE)

    def _view(self, topic: str) -> LogView:
        archived = self.manifest.topics[topic]
        return LogView(topic_name(self._run, topic), archived.topic_id, dict(archived.position))

    def add(self, entry: ArchivedRecord) -> None:
        """Add a record; records of a partition must be added in order."""
        place = entry.topic, entry.partition
        entries = self._entries.setdefault(place, [])
        entries.append(entry)
        self.buffered_bytes += entry.size_bytes + 64
        if len(entries) % CONVERTED_AT_ONCE == 0:
            self._convert(place, entries[-CONVERTED_AT_ONCE:])

    def commit(self, positions: Mapping[TopicPartitionKey, int]) -> ArchiveManifest:
        """Commit all added records; the archive then reaches up to `positions`.

        Raises Fenced if another writer took over; the records are then not in the archive.
        """
        self.start(positions)
        return self.finish()

    def start(self, positions: Mapping[TopicPartitionKey, int]) -> None:
        """Start to write files with all added records, after committing the files that were started before.

        Raises as `commit` does.
        """
        self.finish()
        files = []
        for place, entries in sorted(self._entries.items()):
            files += [self._pool.submit(self._write, *part) for part in self._parts(place, entries)]
        self._entries, self.buffered_bytes = {}, 0
        self._writing = files, dict(positions)

    def finish(self) -> ArchiveManifest:
        """Commit the files that were started, if any. Raises as `commit` does."""
        if self._writing is not None:
            futures, positions = self._writing
            files = [future.result() for future in futures]
            topics = {
                name: replace(topic, position={p: positions.get((name, p), at) for p, at in topic.position.items()})
                for name, topic in self.manifest.topics.items()
            }
            changed = replace(self.manifest, topics=topics, files=(*self.manifest.files, *files))
            self.manifest = manifests.commit(self._store, changed)
            self._writing = None
            if self._freed.give_back():
                pa.default_memory_pool().release_unused()
        return self.manifest

    def _convert(self, place: TopicPartitionKey, entries: Sequence[ArchivedRecord]) -> None:
        """Make the rows of these records, which are the next of their partition."""
        topic, partition = place
        rows: dict[tuple[str, str], list[Row]] = {}
        for entry in entries:
            date = date_at(entry.timestamp_ms)
            try:
                of_record = list(rows_of(entry, arrays=self._arrays))
            except RecordError as error:
                self.skipped.note(Skipped(topic_name(self._run, topic), partition, entry.offset, str(error)))
                continue
            for table, row in of_record:
                rows.setdefault((table, date), []).append(row)
        tables = self._tables.setdefault(place, {})
        for (table, date), of_one in rows.items():
            tables.setdefault((table, date), []).append(table_of(table, self._run, date, of_one))

    def _parts(
        self, place: TopicPartitionKey, entries: Sequence[ArchivedRecord]
    ) -> Iterator[tuple[_FileSpec, pa.Table]]:
        """Yield the rows of each file."""
        topic, partition = place
        begin, end = self._begin(place), entries[-1].offset + 1
        self._reached[place] = end
        if rest := len(entries) % CONVERTED_AT_ONCE:
            self._convert(place, entries[-rest:])
        log = _FileSpec(LOG, topic, partition, "", date_at(entries[0].timestamp_ms), begin, end)
        yield log, log_table(self._run, entries)
        for (name, date), tables in self._tables.pop(place).items():
            for environment, table in _shared_out(pa.concat_tables(tables)):
                yield _FileSpec(name, topic, partition, environment, date, begin, end), table

    def _begin(self, place: TopicPartitionKey) -> int:
        """Return the first offset of the next log file of a partition, which is the end of the last log file."""
        if place in self._reached:
            return self._reached[place]
        topic, partition = place
        ends = (f.end for f in self.manifest.files_of(LOG) if (f.topic, f.partition) == place)
        return max(ends, default=self.manifest.topics[topic].begin[partition])

    def _write(self, part: _FileSpec, table: pa.Table) -> ArchivedFile:
        offsets = table["offset"]
        return _stored(self._store, self._run, part, [table], offsets[0].as_py(), offsets[-1].as_py())

    def compact(self, *, gradually: bool = False) -> int:
        """Merge small files of the same table, partition, environment and date; return the reduction in files.

        If `gradually`, a merge needs at least sixteen files, and takes the newest and older files of similar size.
        Replaced files are deleted after the new manifest is committed, because a file pattern would match their rows
        twice; readers go on with the files of the new manifest.
        """
        self.finish()
        groups: dict[tuple[str, str, int, str, str], list[list[ArchivedFile]]] = {}
        for file in sorted(self.manifest.files, key=lambda f: (f.begin, f.first)):
            if file.size_bytes >= SMALL_BYTES:
                continue
            runs = groups.setdefault((file.table, file.topic, file.partition, file.environment, file.date), [[]])
            # Files of the log are merged only if they are contiguous.
            apart = runs[-1] and file.table == LOG and runs[-1][-1].end != file.begin
            if apart or sum(f.size_bytes for f in runs[-1]) + file.size_bytes > LARGE_BYTES:
                runs.append([])
            runs[-1].append(file)
        due = [_newest(files) if gradually else files for runs in groups.values() for files in runs]
        chosen = [files for files in due if len(files) > 1]
        if not chosen:
            return 0
        # The merges run one after another, because each keeps a row group and its output file in memory.
        merged = [_merged(self._store, self._run, files) for files in chosen]
        replaced = {file.path for files in chosen for file in files}
        left = tuple(file for file in self.manifest.files if file.path not in replaced)
        self.manifest = manifests.commit(self._store, replace(self.manifest, files=(*left, *merged)))
        manifests.sweep(self._store, self.manifest)
        return len(replaced) - len(merged)


def _shared_out(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield the environment and the rows of each file; the environment is "" for a file that several share.

    A run may have thousands of environments, and a separate file for each of them in every commit would consist mostly
    of footers.
    """
    column = table["environment"]
    by_size = sorted(column.value_counts().to_pylist(), key=lambda count: -count["counts"])
    own = [count["values"] for count in by_size[:OWN_FILES]]
    for environment in own:
        yield environment, table.filter(pc.equal(column, environment)) if len(own) > 1 else table
    if by_size[OWN_FILES:]:
        yield "", table.filter(pc.invert(pc.is_in(column, pa.array(own))))


def _newest(files: Sequence[ArchivedFile]) -> Sequence[ArchivedFile]:
    """Return the files to merge next; none if there are fewer than sixteen.

    These are the newest files, back to the first that is more than twice as large as all files after it together. So
    the number of times that a row is rewritten, and the number of files that remain, grow with the logarithm of the
    number of rows.
    """
    if len(files) < MOST_SMALL:
        return ()
    size_bytes = 0
    for count, file in enumerate(reversed(files)):
        if count and file.size_bytes > 2 * size_bytes:
            return files[-count:]
        size_bytes += file.size_bytes
    return files


def _merged(store: Store, run: str, files: Sequence[ArchivedFile]) -> ArchivedFile:
    tables = (table for file in files for table in _tables(store, file))
    head = files[0]
    part = _FileSpec(
        head.table, head.topic, head.partition, head.environment, head.date, head.begin, max(f.end for f in files)
    )
    return _stored(store, run, part, tables, min(f.first for f in files), max(f.last for f in files))


def _stored(store: Store, run: str, part: _FileSpec, tables: Iterable[pa.Table], first: int, last: int) -> ArchivedFile:
    data, rows = parquet(tables, SCHEMAS[part.table])
    folders = f"table={part.table}/environment={_folder(part.environment)}/date={part.date}"
    # Names are unique, so that a file left by a crash is never confused with a file in a manifest.
    name = f"{part.topic}-{part.partition}-{first}-{last}-{uuid.uuid4().hex[:12]}.parquet"
    path = f"{folder_of(run)}/{folders}/{name}"
    store.write(path, data)
    return ArchivedFile(
        path=path,
        table=part.table,
        topic=part.topic,
        partition=part.partition,
        environment=part.environment,
        date=part.date,
        begin=part.begin,
        end=part.end,
        first=first,
        last=last,
        rows=rows,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _folder(environment: str) -> str:
    """Return the Hive folder name of an environment. Long names are shortened; the files hold them in full."""
    quoted = quote(environment, safe=" ") or "__HIVE_DEFAULT_PARTITION__"
    if len(quoted) <= _LONGEST_NAME:
        return quoted
    return f"{quoted[: _LONGEST_NAME - 20].rstrip('%')}-{hashlib.sha256(environment.encode()).hexdigest()[:16]}"


def read_table(store: Store, file: ArchivedFile) -> pa.Table:
    """Read the rows of a file. Raises StateRefused if it is missing, or differs from the manifest."""
    data = checked(store, file.path, file.sha256)
    with refusing(f"{store.url}/{file.path}"):
        # Threads of Arrow may abort the process at its exit (apache/arrow issue 39862).
        return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False).cast(SCHEMAS[file.table])


def _tables(store: Store, file: ArchivedFile) -> Iterator[pa.Table]:
    """Yield the rows of a file in pieces. Raises as `read_table` does."""
    data = checked(store, file.path, file.sha256)
    with refusing(f"{store.url}/{file.path}"):
        parts = pq.ParquetFile(pa.BufferReader(data))
        for batch in parts.iter_batches(rows_of_piece(parts.metadata), use_threads=False):
            yield pa.Table.from_batches([batch]).cast(SCHEMAS[file.table])


def records(
    store: Store, manifest: ArchiveManifest, topic: str, partition: int, start: int = 0
) -> Iterator[ArchivedRecord]:
    """Yield the archived records of a partition from offset `start` on, in order, up to the manifest's position.

    If an archiver merges files meanwhile, the rest is read from the files of its newest manifest. Raises as
    `read_table` does.
    """
    archived = manifest.topics.get(topic)
    end = archived.position.get(partition, 0) if archived else 0
    merged: ArchiveManifest | None = manifest
    while merged is not None:
        manifest, merged = merged, None
        for file in manifest.files_of(LOG):
            if (file.topic, file.partition) != (topic, partition) or not file.begin < end or file.end <= start:
                continue
            try:
                data = checked(store, file.path, file.sha256)
            except ObjectMissing:
                merged = _without(store, manifest.run, file)
                if merged is None:
                    raise
                break
            entries = archived_records(data, topic, partition)
            yield from (entry for entry in entries if start <= entry.offset < end)
            start = file.end


def check_digests(store: Store, manifest: ArchiveManifest, tables: Collection[str]) -> ArchiveManifest:
    """Compare digests of the files of some tables with the manifest, and return it.

    If an archiver merges files meanwhile, the newest manifest is returned, whose files were then compared. Raises
    StateRefused for the first file that is missing or differs.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        return _check(
            store,
            manifest,
            lambda file: file.table in tables,
            lambda files: pool.map(lambda file: len(checked(store, file.path, file.sha256)), files),
        )


def check_files(store: Store, manifest: ArchiveManifest) -> ArchiveManifest:
    """Compare digests and row counts of all files with the manifest; return the manifest whose files were compared.

    It is the given manifest, or, if an archiver merges files meanwhile, its newest one. Raises StateRefused for the
    first file that is missing or differs.
    """

    def check(file: ArchivedFile) -> None:
        rows = len(read_table(store, file))
        if rows != file.rows:
            raise StateRefused(f"{store.url}/{file.path} has {rows} rows, but the manifest says {file.rows}")

    return _check(store, manifest, lambda _file: True, lambda files: map(check, files))


def check_arrays(store: Store, manifest: ArchiveManifest) -> int:
    """Compare the digest of every stored array that archived records name; return their number.

    Raises StateRefused for the first that is missing or differs.
    """
    arrays = StoredArrays(store, manifests.arrays_folder(manifest.run))
    names: set[str] = set()
    for topic in NAMING:
        for partition in manifest.topics[topic].position if topic in manifest.topics else ():
            for entry in records(store, manifest, topic, partition):
                names |= names_in(entry.value)
    for name in sorted(names):
        try:
            arrays.read(name)
        except ArrayMissing as error:
            raise StateRefused(f"an archived record names an array, but {error}") from error
    return len(names)


def _check(
    store: Store,
    manifest: ArchiveManifest,
    wanted: Callable[[ArchivedFile], bool],
    check: Callable[[Sequence[ArchivedFile]], Iterator[object]],
) -> ArchiveManifest:
    """Check the wanted files of a manifest; return the manifest whose files were checked.

    `check` yields something for each file that it has checked. Files never change, so none is checked twice.
    """
    good: set[str] = set()
    while True:
        left = [file for file in manifest.files if wanted(file) and file.path not in good]
        results = check(left)
        for file in left:
            try:
                next(results)
            except ObjectMissing:
                merged = _without(store, manifest.run, file)
                if merged is None:
                    raise
                manifest = merged
                break
            good.add(file.path)
        else:
            return manifest


def _without(store: Store, run: str, file: ArchivedFile) -> ArchiveManifest | None:
    """Return the newest manifest if it does not name a file, because an archiver has merged it; else None."""
    current = manifests.newest(store, run)
    return None if current is None or any(other.path == file.path for other in current.files) else current
