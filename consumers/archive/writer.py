"""Records into files, files into the manifest: exactly once, whatever the moment of a crash.

Records are kept in memory until files are written of them, and then the manifest that names these together with the
positions after them. Who starts again goes on from the manifest's positions.
"""

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from consumers.archive import manifest as manifests
from consumers.archive.manifest import LOG, ArchivedFile, ArchivedTopic, Manifest, folder_of
from consumers.archive.store import Store, checked
from consumers.archive.tables import SCHEMAS, Entry, Row, date_at, entries_of, log_row, parquet, rows_of, table_of
from topics.catalogue import topic_name
from topics.errors import RecordError, StateRefused
from topics.skipped import Skipped, SkippedRecords

Place = tuple[str, int]
"""Topic and partition."""
_LONGEST_NAME = 120
_THREADS = 2
SMALL_BYTES = 16 * 1024 * 1024
"""Files of fewer bytes are worth merging."""
LARGE_BYTES = 128 * 1024 * 1024
"""What is merged does not exceed this."""
MOST_SMALL = 16
"""Small files of one table, partition, environment and date above which an archiver merges them by itself."""


@dataclass(frozen=True)
class _Part:
    """What one file is about to be made of."""

    table: str
    topic: str
    partition: int
    environment: str
    date: str
    begin: int
    end: int


class ArchiveWriter:
    """The one writer of a run's archive; whoever wrote before is displaced, and what it left unnamed deleted."""

    def __init__(self, store: Store, run: str, *, arrays: bool = False) -> None:
        self._store, self._run, self._arrays = store, run, arrays
        self.manifest = manifests.take_over(store, run)
        self.swept = manifests.sweep(store, self.manifest)
        """Files deleted that no manifest named."""
        self.skipped = SkippedRecords("archive", logged=False)
        """Records of which something is not in the archive (headers), or no row in a table but `log`."""
        self.buffered_bytes = 0
        self._entries: dict[Place, list[Entry]] = {}
        self._reached: dict[Place, int] = {}
        self._pool = ThreadPoolExecutor(_THREADS)
        self._writing: tuple[list[Future[ArchivedFile]], dict[Place, int]] | None = None

    def close(self) -> None:
        """End its threads; what was not committed does not count."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, topic: str, topic_id: str, first: Mapping[int, int]) -> dict[int, int]:
        """Where to read a topic from, by partition; `first` is where each begins on the broker now.

        Raises StateRefused where the topic is another one than was archived, or was pruned beyond what was archived.
        """
        known = self.manifest.topics.get(topic)
        if known is None:
            found = ArchivedTopic(topic_id=topic_id, begin=dict(first), position=dict(first))
            self.manifest = replace(self.manifest, topics={**self.manifest.topics, topic: found})
            return dict(first)
        if known.topic_id != topic_id or known.position.keys() != first.keys():
            raise StateRefused(
                f"{self._run}.{topic} was deleted and created again since it was archived to {self._store.url}; "
                f"archive to another place"
            )
        for partition, low in first.items():
            if known.position[partition] < low:
                raise StateRefused(
                    f"{self._run}.{topic}[{partition}] begins at offset {low}, and is archived up to "
                    f"{known.position[partition]}: what lay between was deleted; archive to another place"
                )
        return dict(known.position)

    def add(self, entry: Entry) -> None:
        """Take a record; records of a partition come in their order."""
        self._entries.setdefault((entry.topic, entry.partition), []).append(entry)
        self.buffered_bytes += len(entry.value or b"") + len(entry.key or b"") + 64

    def commit(self, positions: Mapping[Place, int]) -> Manifest:
        """Make all that was added part of the archive, which then reaches up to `positions`.

        Raises Fenced where another writer took over: nothing of this counts then.
        """
        self.start(positions)
        return self.finish()

    def start(self, positions: Mapping[Place, int]) -> None:
        """Begin to write files of all that was added, and return; what was begun before is committed first.

        Raises as `commit` does.
        """
        self.finish()
        files = []
        for place, entries in sorted(self._entries.items()):
            files += [self._pool.submit(self._write, *part) for part in self._parts(place, entries)]
        self._entries, self.buffered_bytes = {}, 0
        self._writing = files, dict(positions)

    def finish(self) -> Manifest:
        """Commit what was begun, where something was. Raises as `commit` does."""
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
        return self.manifest

    def _parts(self, place: Place, entries: Sequence[Entry]) -> Iterator[tuple[_Part, Sequence[Row], int, int]]:
        """Rows by file, with the first and last offset in each."""
        topic, partition = place
        begin, end = self._begin(place), entries[-1].offset + 1
        self._reached[place] = end
        of = _Part(LOG, topic, partition, "", date_at(entries[0].timestamp_ms), begin, end)
        yield of, [log_row(entry) for entry in entries], entries[0].offset, end - 1
        found: dict[tuple[str, str, str], list[Row]] = {}
        for entry in entries:
            date = date_at(entry.timestamp_ms)
            try:
                rows = list(rows_of(entry, arrays=self._arrays))
            except RecordError as error:
                self.skipped.note(Skipped(topic_name(self._run, topic), partition, entry.offset, str(error)))
                continue
            for table, environment, row in rows:
                found.setdefault((table, environment, date), []).append(row)
        for (table, environment, date), of_file in found.items():
            # Rows begin with topic, partition and offset.
            yield _Part(table, topic, partition, environment, date, begin, end), of_file, of_file[0][2], of_file[-1][2]

    def _begin(self, place: Place) -> int:
        """Where the next file of a partition's log begins: where the last one ends."""
        if place in self._reached:
            return self._reached[place]
        topic, partition = place
        ends = (f.end for f in self.manifest.of(LOG) if (f.topic, f.partition) == place)
        return max(ends, default=self.manifest.topics[topic].begin[partition])

    def _write(self, part: _Part, rows: Sequence[Row], first: int, last: int) -> ArchivedFile:
        table = table_of(part.table, self._run, part.environment, part.date, rows)
        return _stored(self._store, self._run, part, [table], first, last)

    def compact(self, *, at_least: int = 2) -> int:
        """Merge small files of the same table, partition, environment and date; returns how many files fewer there are.

        Only where there are `at_least` of them. What was replaced is deleted once the new manifest stands.
        """
        self.finish()
        groups: dict[tuple[str, str, int, str, str], list[list[ArchivedFile]]] = {}
        for file in sorted(self.manifest.files, key=lambda f: (f.begin, f.first)):
            if file.size_bytes >= SMALL_BYTES:
                continue
            runs = groups.setdefault((file.table, file.topic, file.partition, file.environment, file.date), [[]])
            # Files of the log go together only where nothing lies between them.
            apart = runs[-1] and file.table == LOG and runs[-1][-1].end != file.begin
            if apart or sum(f.size_bytes for f in runs[-1]) + file.size_bytes > LARGE_BYTES:
                runs.append([])
            runs[-1].append(file)
        chosen = [files for runs in groups.values() for files in runs if len(files) >= max(at_least, 2)]
        if not chosen:
            return 0
        merged = list(self._pool.map(partial(_merged, self._store, self._run), chosen))
        replaced = {file.path for files in chosen for file in files}
        left = tuple(file for file in self.manifest.files if file.path not in replaced)
        self.manifest = manifests.commit(self._store, replace(self.manifest, files=(*left, *merged)))
        manifests.sweep(self._store, self.manifest)
        return len(replaced) - len(merged)


def _merged(store: Store, run: str, files: Sequence[ArchivedFile]) -> ArchivedFile:
    tables = (read_table(store, file) for file in files)
    head = files[0]
    part = _Part(
        head.table, head.topic, head.partition, head.environment, head.date, head.begin, max(f.end for f in files)
    )
    return _stored(store, run, part, tables, min(f.first for f in files), max(f.last for f in files))


def _stored(store: Store, run: str, part: _Part, tables: Iterable[pa.Table], first: int, last: int) -> ArchivedFile:
    data, rows = parquet(tables, SCHEMAS[part.table])
    folders = f"table={part.table}/environment={_folder(part.environment)}/date={part.date}"
    # No two are alike, so that what a crash left behind is never taken for what a manifest names.
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
    """An environment as the name of a folder, as Hive spells it; a long one shortened: files hold it whole."""
    quoted = quote(environment, safe=" ") or "__HIVE_DEFAULT_PARTITION__"
    if len(quoted) <= _LONGEST_NAME:
        return quoted
    return f"{quoted[: _LONGEST_NAME - 20].rstrip('%')}-{hashlib.sha256(environment.encode()).hexdigest()[:16]}"


def read_table(store: Store, file: ArchivedFile) -> pa.Table:
    """A file's rows. Raises StateRefused where it is missing, or another than the manifest names."""
    data = checked(store, file.path, file.sha256)
    return pq.read_table(pa.BufferReader(data)).cast(SCHEMAS[file.table])


def records(store: Store, manifest: Manifest, topic: str, partition: int) -> Iterator[Entry]:
    """The archived records of a partition, in the order of their offsets. Raises as `read_table` does."""
    for file in manifest.of(LOG):
        if (file.topic, file.partition) == (topic, partition):
            yield from entries_of(checked(store, file.path, file.sha256), topic, partition)


def check_files(store: Store, files: Iterable[ArchivedFile]) -> int:
    """Read every file again: digests and rows must be the manifest's. Returns how many. Raises StateRefused."""
    count = 0
    for file in files:
        rows = len(read_table(store, file))
        if rows != file.rows:
            raise StateRefused(f"{store.url}/{file.path} has {rows} rows, the manifest says {file.rows}")
        count += 1
    return count
