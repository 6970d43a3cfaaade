"""Fills an index from a source. Rows and positions commit in one transaction, so filling resumes at the positions.

One process writes rows at a time; another process can read them, and takes over once the writer has ended. Places may
be written by any process, and a record that another process has written is passed over.
"""

import fcntl
import hashlib
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from rollstream.consumers.archive.log_source import PLACES, ROLLOUTS, LogSource
from rollstream.pipeline.command_line.progress_bar import ProgressCallback
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import schema, sqlite_files
from rollstream.pipeline.index.ingest import Ingest, decoded
from rollstream.pipeline.index.places import PlaceTables
from rollstream.pipeline.ui_config import UiConfig
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded
from rollstream.topics.kafka.client_calls import OffsetGone
from rollstream.topics.kafka.records import KafkaRecord, Place
from rollstream.topics.logs import event
from rollstream.topics.records import JournalRecord, TrainingBatch
from rollstream.topics.wire.catalogue import name_in_run

logger = logging.getLogger(__name__)
_PORTION = 4000
"""Maximum number of records of `rollouts`, and of records of the other topics, that are read at once."""
_COMMITTED = {schema.ROWS: 10_000, schema.PLACES: 50_000}
"""Records read in a transaction of a layer before it commits, as long as more are available. A large transaction writes
a page of the SQLite indexes once for many rows; it takes about a second, and readers do not wait for it."""
PATIENCE_S = 60.0
_WAITING_BYTES = 64 * 1024 * 1024
"""Bytes of records that may wait for the rollouts that they name; beyond this, no more such records are read."""


class _Waiting(NamedTuple):
    """A record that names rollouts."""

    message: KafkaRecord
    own: Place
    """Its topic and partition."""
    place: Place
    """The partition of `rollouts` that it names."""
    needed: int
    """Position up to which that partition must be read before the record is written."""
    record: object


def index_file(config: RunConfig, archive: str = "") -> Path:
    """Return the path of the index of a run's topics, or of an archive at a path or URL."""
    name = f"index-{hashlib.sha256(archive.encode()).hexdigest()[:12]}.sqlite" if archive else "index.sqlite"
    return config.run_dir / name


class IndexWriter(Closing):
    """The writer of one index, which reads a source but does not close it."""

    def __init__(
        self,
        path: Path,
        source: LogSource,
        layer: str = schema.ROWS,
        *,
        commit_records: int = 0,
        cache_bytes: int = UiConfig.index_cache_bytes,
    ) -> None:
        """A writer of rows writes places, too. It commits after `commit_records` records, by default a number for each
        layer, or when no more are available, and keeps `cache_bytes` of the file in memory.

        Raises ConfigurationError if the file cannot be written.
        """
        self._path, self._source, self._layer = path, source, layer
        self._commit_records = commit_records or _COMMITTED[layer]
        self._cache_bytes = cache_bytes
        with self._writable():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        self._owns = False
        """Whether this process alone may create the file anew."""
        self._ingest: Ingest | None = None
        self._at: dict[Place, int] = {}
        """Positions of the layer."""
        self._placed: dict[Place, int] = {}
        """Positions of the places during a transaction."""
        self._partitions = 0
        self._waiting: deque[_Waiting] = deque()
        """Records whose rollouts have not been read yet."""
        self._waiting_bytes = 0

    @property
    def owned(self) -> bool:
        """Whether this process writes to the index."""
        return self._ingest is not None

    def close(self) -> None:
        """Release the file."""
        if self._ingest is not None:
            self._ingest.db.close()
            self._ingest = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def begin(self) -> bool:
        """Open the index for writing; return False while another process writes rows to it or creates it.

        Raises ConfigurationError if the file cannot be written, and the errors of the source.
        """
        if self._ingest is not None:
            return True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._owns = True
        except BlockingIOError:
            if self._layer == schema.PLACES and self._path.exists():
                self._start(sqlite_files.existing(self._path, schema.full_identity(self._source.identity())))
            return self._ingest is not None
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._rebuild(error)
        return True

    def _open(self) -> None:
        """Open the file, or create it anew, as its only owner."""
        identity = self._source.identity()
        with self._writable():
            db = schema.create(self._path, identity)
        self._start(db)

    def _start(self, db: sqlite3.Connection | None) -> None:
        if db is not None:
            sqlite_files.limit_cache(db, self._cache_bytes)
            self._ingest, self._places = Ingest(db), PlaceTables(db)
            self._restart()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigurationError(
                f"the index of a run cannot be written to {self._path} ({error}); free space, or give a writable "
                "directory with --set data_dir=DIRECTORY"
            ) from error

    def poll(self, wait_s: float = 0.0) -> int:
        """Write the records that arrived; wait at most `wait_s` for the first. Returns how many were read."""
        if not self.begin():
            time.sleep(wait_s)
            return 0
        try:
            return self._poll(wait_s)
        except OffsetGone:
            self._restart()  # Records were pruned before they were read.
            return 1
        except sqlite3.DatabaseError as error:
            self._rebuild(error)
            return 1

    def _rebuild(self, error: sqlite3.DatabaseError) -> None:
        """Create the file anew if it is damaged; raise any other error again."""
        if not (self._owns and sqlite_files.is_damage(error)):
            raise error
        event(logger, "index_rebuilt", level=logging.WARNING, file=str(self._path), error=str(error))
        self._recreate()

    def _recreate(self) -> None:
        if self._ingest is not None:
            self._ingest.db.close()
            self._ingest = None
        sqlite_files.remove(self._path)
        self._open()

    def catch_up(self, show: ProgressCallback = lambda _done, _total: None) -> None:
        """Return once every record that is on the log now is written, by this process or by the one that writes rows.

        Raises DeadlineExceeded if nothing is written for long.
        """
        ends = {place: end for place, (_low, end) in self._source.bounds().items()}
        self.begin()
        left, deadline = self._left(ends), time.monotonic() + PATIENCE_S
        total = sum(left.values())
        while left:
            self.poll(0.1)
            before, left = left, self._left(ends)
            if left != before:
                deadline = time.monotonic() + PATIENCE_S
                show(total - sum(left.values()), total)
            elif time.monotonic() > deadline:
                topic, partition = next(iter(left))
                raise DeadlineExceeded(
                    f"{topic}[{partition}] was not read to its end in {PATIENCE_S:g} s; if another process, such as "
                    f"`rollstream ui`, fills {self._path}, stop it, or give a directory of its own with "
                    "--set data_dir=DIRECTORY"
                )

    def _left(self, ends: Mapping[Place, int]) -> dict[Place, int]:
        """Return the number of offsets that are not written yet, for each partition that has such offsets."""
        at = self._at
        if self._ingest is None and self._path.exists():
            with closing(sqlite_files.reader(self._path)) as db:
                # Another process may have created the file, and its tables not yet.
                at = positions_of(db, self._layer) if sqlite_files.identity_of(db) else {}
        return {place: end - at.get(place, 0) for place, end in ends.items() if at.get(place, 0) < end}

    def _restart(self) -> None:
        """Begin to read at the positions stored in the index."""
        assert self._ingest is not None
        self._ingest.forget()
        self._places.forget()
        self._waiting.clear()
        self._waiting_bytes = 0
        positions, bounds = positions_of(self._ingest.db, self._layer), self._source.bounds()
        if self._owns and any(at > bounds.get(place, (0, at))[1] for place, at in positions.items()):
            self._recreate()  # A partition was truncated.
            return
        self._partitions = sum(name == ROLLOUTS for name, _partition in bounds)
        self._at = {place: max(low, positions.get(place, low)) for place, (low, _end) in bounds.items()}
        self._source.begin(self._at)

    def _poll(self, wait_s: float) -> int:
        rollouts, others = self._read(wait_s)
        if not rollouts and not others and self._waiting:
            self._release()
        if not (rollouts or others or self._waiting or self._new_ends()):
            return 0
        count = 0
        with self._transaction() as ingest:
            while True:
                self._write(ingest, rollouts, others, self._new_ends())
                count += len(rollouts) + len(others)
                if count >= self._commit_records:
                    return count
                rollouts, others = self._read(0.0)
                if not rollouts and not others:
                    return count

    def _read(self, wait_s: float) -> tuple[list[KafkaRecord], list[KafkaRecord]]:
        """Return records of `rollouts` and of the other topics; wait at most `wait_s` for the first."""
        rollouts = self._source.poll(True, _PORTION, 0.0)
        others: list[KafkaRecord] = []
        if self._waiting_bytes < _WAITING_BYTES:
            others = self._source.poll(False, _PORTION, 0.0 if rollouts or self._waiting else wait_s)
        return rollouts, others

    def _new_ends(self) -> dict[Place, int]:
        """Return the ends of partitions that were read to their end, if the index does not have them yet."""
        return {place: end for place, end in self._source.ends().items() if end > self._at.get(place, 0)}

    def _write(
        self, ingest: Ingest, rollouts: list[KafkaRecord], others: list[KafkaRecord], ends: dict[Place, int]
    ) -> None:
        self._places.rollouts(m for m in rollouts if m.offset >= self._placed.get((ROLLOUTS, m.partition), 0))
        records = [self._place(message) for message in others]
        read = {(ROLLOUTS, message.partition): message.offset + 1 for message in rollouts}
        for place, end in (*read.items(), *ends.items()):
            if place[0] in PLACES:
                self._placed[place] = max(self._placed.get(place, 0), end)
            if place[0] == ROLLOUTS:
                self._at[place] = max(self._at.get(place, 0), end)
        if self._layer == schema.PLACES:
            self._at.update({**self._placed, **ends})
            return
        ingest.rollouts(rollouts)
        for message, record in zip(others, records, strict=True):
            self._waiting.append(_waiting(message, record))
            self._waiting_bytes += len(message.value or b"")
        self._take_waiting(ingest)
        held = {waiting.own for waiting in self._waiting}
        for place, end in ends.items():
            if place not in held:
                self._at[place] = max(self._at.get(place, 0), end)

    def _place(self, message: KafkaRecord) -> object:
        """Write the place of a record if no process has written it; return the record if it is decoded."""
        place = name_in_run(message.topic), message.partition
        if place[0] not in PLACES or message.offset < self._placed.get(place, 0):
            return None
        self._placed[place] = message.offset + 1
        return self._places.take(message, self._partitions)

    def _take_waiting(self, ingest: Ingest) -> None:
        """Write the records whose rollouts have been read, in order within each partition."""
        kept: deque[_Waiting] = deque()
        held: set[Place] = set()
        for item in self._waiting:
            message, needed = item.message, item.needed
            if item.own in held or self._at.get(item.place, 0) < needed:
                held.add(item.own)
                kept.append(item)
            else:
                ingest.other(message, item.record)
                self._at[item.own] = message.offset + 1
                self._waiting_bytes -= len(message.value or b"")
        self._waiting = kept

    def _release(self) -> None:
        """Stop waiting for offsets of `rollouts` beyond the end of a partition that was truncated."""
        bounds = self._source.bounds()
        self._waiting = deque(
            item._replace(needed=0) if bounds.get(item.place, (0, 0))[1] < item.needed else item
            for item in self._waiting
        )

    @contextmanager
    def _transaction(self) -> Iterator[Ingest]:
        """Commit the block's writes with the positions. After an error, roll back and read the records again."""
        assert self._ingest is not None
        db = self._ingest.db
        db.execute("begin immediate")
        try:
            self._placed = positions_of(db, schema.PLACES)
            yield self._ingest
            layers = {schema.PLACES: self._placed, self._layer: self._at}
            db.executemany(
                "insert into positions (layer, topic, partition, position) values (?, ?, ?, ?)"
                " on conflict do update set position = max(position, excluded.position)",
                [(layer, *place, at) for layer, positions in layers.items() for place, at in positions.items()],
            )
            self._places.finish()
            self._ingest.finish()
            db.execute("commit")
        except BaseException:
            db.execute("rollback")
            self._restart()
            raise


def positions_of(db: sqlite3.Connection, layer: str) -> dict[Place, int]:
    """Return the offset of the next record of each partition that a layer of an index has read."""
    answer = db.execute("select topic, partition, position from positions where layer = ?", (layer,))
    return {(topic, partition): at for topic, partition, at in answer}


def _waiting(message: KafkaRecord, record: object) -> _Waiting:
    """Note the position up to which `rollouts` must be read before a record that names rollouts."""
    own, place = (name_in_run(message.topic), message.partition), (ROLLOUTS, message.partition)
    if record is None and own[0] in ("journal", "batches"):
        record = decoded(message)
    if isinstance(record, JournalRecord):
        return _Waiting(message, own, (ROLLOUTS, record.partition), record.position, record)
    if isinstance(record, TrainingBatch) and len(record.source_offsets):
        return _Waiting(message, own, place, int(record.source_offsets.max()) + 1, record)
    return _Waiting(message, own, place, 0, record)
