"""RunIndex: the index of a run, for the queries of `rollstream.pipeline.index`. It needs no server.

One thread of one process fills the index, while any number of threads and processes query it.
"""

import sqlite3
import threading
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.consumers.archive.log_source import ArchiveSource, LogSource, TopicSource
from rollstream.consumers.archive.manifest import arrays_folder
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import details as rollout_details
from rollstream.pipeline.index import schema, sqlite_files
from rollstream.pipeline.index.indexed_run import IndexedRun, RolloutPlace, TokenizerOfSource
from rollstream.pipeline.index.writer import IndexWriter, index_file, positions_of
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.files.stored_arrays import ArrayMissing, StoredArrays
from rollstream.topics.files.stores import open_store
from rollstream.topics.wire.media import Medium


class IndexProgress(NamedTuple):
    """How far an index has read its source."""

    offset_total: int
    offset_done: int


class _Opened(NamedTuple):
    """A connection, and the file that it has open."""

    connection: sqlite3.Connection
    inode: int


class RunIndex(Closing):
    """The index of one run."""

    def __init__(self, config: RunConfig, path: Path, source: LogSource, archive: str = "") -> None:
        """Use `RunIndex.open` instead."""
        self._config, self._path, self._source, self._archive = config, path, source, archive
        self._writer = IndexWriter(path, source, cache_bytes=config.ui.index_cache_bytes)
        self._local = threading.local()
        """Connections of the threads that query the index."""
        self._tokenizer = TokenizerOfSource(source)
        self._identity: dict[str, str] | None = None

    @classmethod
    def open(cls, config: RunConfig, archive: str = "", *, fills: bool = True) -> "RunIndex":
        """Open the index of a run's topics, or of an archive at a path or URL.

        Without `fills` the index is only queried: another process has created its file and fills it. Raises TopicError
        if the run does not exist, BrokerUnavailable, or ConfigurationError for a missing archive.
        """
        source: LogSource
        if archive:
            source = ArchiveSource(open_store(archive), config.run)
        else:
            source = TopicSource(config.kafka, config.run)
        index = cls(config, index_file(config, archive), source, archive)
        if fills:
            index.begin()
        return index

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._source.run

    @property
    def source(self) -> str:
        """Kind of its source: topics or archive."""
        return self._source.kind

    def begin(self) -> None:
        """Create or open the file for writing, unless another process already writes to it."""
        self._writer.begin()

    def close(self) -> None:
        """Close the connections; the file stays. A query that another thread has begun still gets its answer."""
        self._writer.close()
        self._source.close()
        # A connection closes once no thread refers to it; closing one that another thread uses would crash SQLite.
        self._local = threading.local()

    # ------------------------------------------------------------------ filling

    def poll(self, wait_s: float = 0.0) -> int:
        """Index the records that arrived, waiting at most `wait_s` for the first; return how many were read.

        Call it from one thread at a time. Returns 0 while another process fills this index.
        """
        return self._writer.poll(wait_s)

    def catch_up(self) -> None:
        """Return once every record that is on the log now is indexed, by this process or by the one that fills it.

        Raises DeadlineExceeded if nothing is indexed for a minute.
        """
        self._writer.catch_up()

    def progress(self) -> IndexProgress:
        """Return how far the source has been read."""
        bounds = self._source.bounds()
        at = positions_of(self.db, schema.ROWS)
        total = sum(end - low for low, end in bounds.values())
        left = sum(max(0, end - max(low, at.get(place, low))) for place, (low, end) in bounds.items())
        return IndexProgress(total, total - left)

    # ------------------------------------------------------------------ queries

    def details(self, place: RolloutPlace, tokens_from: int = 0) -> dict[str, Any]:
        """Return all details of one rollout. Raises TopicError if the index or the log has no rollout at this place."""
        return rollout_details.details(self.db, IndexedRun(self.db, self._source, self._tokenizer), place, tokens_from)

    def medium(self, place: RolloutPlace, number: int) -> Medium:
        """Return an image of a rollout with its bytes. Raises TopicError if there is none, or its object is missing,
        StoreError if the store cannot be read, and ConfigurationError if kafka.arrays.url is empty."""
        view = IndexedRun(self.db, self._source, self._tokenizer)
        medium = rollout_details.medium(view, place, number)
        if not medium.array.stored:
            return medium
        if self._archive:
            arrays = StoredArrays(open_store(self._archive), arrays_folder(self.run))
        else:
            arrays = StoredArrays.of(self.run, self._config.kafka.arrays)
        try:
            return medium._replace(array=arrays.load(medium.array))
        except ArrayMissing as error:
            raise TopicError(str(error)) from error

    @property
    def db(self) -> sqlite3.Connection:
        """Return this thread's connection for queries, a new one if the file was created anew.

        Raises ConfigurationError if another process fills the file from other topics.
        """
        opened: _Opened | None = getattr(self._local, "opened", None)
        inode = self._path.stat().st_ino if self._path.exists() else 0
        if opened is None or opened.inode != inode:
            if opened is not None:
                opened.connection.close()
                self._local.opened = None
            opened = self._local.opened = _Opened(self._checked_reader(), inode)
        return opened.connection

    def _checked_reader(self) -> sqlite3.Connection:
        if self._identity is None:
            self._identity = schema.full_identity(self._source.identity())
        connection = sqlite_files.reader(self._path)
        try:
            held = sqlite_files.identity_of(connection)
        except BaseException:
            connection.close()
            raise
        # An archive that grew may have topics that it did not have when the file was created.
        if all(held.get(name, value) == value for name, value in self._identity.items()):
            return connection
        connection.close()
        raise ConfigurationError(
            f"{self._path} is the index of other topics than those of run {self.run} here, of another cluster or of "
            "an earlier run, and another process fills it; give this server a directory of its own with "
            "--set data_dir=DIRECTORY"
        )
