"""FilePublisher: writes the chunks of policy versions to files, and removes the files that are no longer needed.

A file counts once a committed manifest names it. A file that a killed publisher left without a manifest is reused if
the next publisher has to write the same bytes, and removed otherwise.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from blake3 import blake3

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import ZSTD, Content, compress, file_name, parsed, pays
from rollstream.consumers.weights.fetcher import FIRST_DELAY_S, LONGEST_DELAY_S
from rollstream.consumers.weights.file_retention import (
    incomplete,
    left_behind,
    listed_files,
    names_store,
    remove_expired,
)
from rollstream.consumers.weights.layout import split
from rollstream.topics.errors import DeliveryError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.parallel import in_parallel
from rollstream.topics.files.stores import StoredFile, fault_of, open_store, shown
from rollstream.topics.logs import event
from rollstream.topics.records import Chunk, PolicyManifest

logger = logging.getLogger(__name__)


class FileWriter:
    """Writes the chunks of one process below the URL of a run."""

    def __init__(self, run: str, config: WeightsConfig) -> None:
        """Open the store at the URL. Raises ConfigurationError if it cannot be opened."""
        self._run, self._config = run, config
        self._store = open_store(config.url)
        self._reusable: dict[str, StoredFile] = {}
        """Files of a version that was never committed, by name."""

    def write(self, version: int, content: Content, first: int = 0) -> tuple[Chunk, ...]:
        """Write the content in chunks, numbered from `first`, and return them once all are stored.

        The chunks are compressed if that pays. Raises DeliveryError if the store does not accept a file in time.
        """
        codec, config = ZSTD if pays(content.views) else "", self._config
        writing = _Writing(self, version, codec, threading.Event(), {})
        deadline = time.monotonic() + config.store_timeout_s

        def check() -> None:
            if time.monotonic() > deadline:
                problem = next(iter(list(writing.problems.values())), "no answer")
                raise DeliveryError(
                    f"policy version {version} was not written to {shown(self._store.url)} within "
                    f"learner.weights.store_timeout_s {config.store_timeout_s:g}: {problem}; check the store, its "
                    "free space and the credentials in this process's environment, then start the learner again: it "
                    "publishes the version again"
                )

        chunks = []
        pieces = enumerate(split(content.views, config.file_bytes), first)
        for chunk in in_parallel(pieces, writing.chunk, config.files_at_once, check=check, ended=writing.ended):
            chunks.append(chunk)
            deadline = time.monotonic() + config.store_timeout_s
        return tuple(sorted(chunks, key=lambda chunk: chunk.index))

    def url(self, name: str) -> str:
        """Return the URL of a file, as in manifests."""
        return f"{self._store.url.rstrip('/')}/{name}"

    def store(self, name: str, data: bytes, digest: str) -> None:
        """Store a file, unless it already exists with these bytes. Raises StoreError or OSError if the store fails."""
        before = self._reusable.get(name)
        usable = before is not None and before.size_bytes == len(data) and self._is_young(before)
        if usable and self._holds(name, digest):
            return
        self._store.write(name, data)
        if (stored := self._store.size_bytes(name)) != len(data):
            raise StoreError(f"{stored} of {len(data)} bytes are stored")

    def _is_young(self, file: StoredFile) -> bool:
        """Whether `rollstream prune` does not remove the file before it is named by a manifest."""
        return (file.modified or 0.0) > time.time() - self._config.orphan_hours * 3600 / 2

    def _holds(self, name: str, digest: str) -> bool:
        try:
            return blake3(self._store.read(name)).hexdigest() == digest
        except (StoreError, OSError):  # The file is written again.
            return False

    @property
    def run(self) -> str:
        """Run whose versions are written."""
        return self._run


class FilePublisher(FileWriter):
    """The files of one publisher of a run. Build it only when no other publisher can commit any more."""

    def __init__(
        self,
        run: str,
        config: WeightsConfig,
        manifests: Mapping[int, PolicyManifest],
        unreadable: Collection[int] = (),
    ) -> None:
        """Find files that earlier publishers left, and versions that lack files. Files of versions whose manifests are
        `unreadable` stay. Raises ConfigurationError if the URL cannot be opened."""
        super().__init__(run, config)
        self._latest = max((*manifests, *unreadable), default=-1)
        self.incomplete: frozenset[int] = frozenset()
        """Versions that are still needed, and of which files were missing or cut short at the start; none if the store
        could not be listed."""
        self._find_left_behind(manifests, unreadable)

    def committed(self, manifest: PolicyManifest) -> None:
        """Note that a version is committed; remove reusable files of this and older versions that it does not name."""
        named = {chunk.url for chunk in manifest.chunks}
        self._latest = max(self._latest, manifest.version)
        over = [name for name in self._reusable if self._version(name) <= manifest.version]
        remove_expired((url for name in over if (url := self.url(name)) not in named), self._config)
        for name in over:
            del self._reusable[name]

    def _find_left_behind(self, manifests: Mapping[int, PolicyManifest], unreadable: Collection[int]) -> None:
        """Remove the files that earlier publishers left, except files that this publisher may reuse."""
        url, timeout_s = self._store.url, self._config.store_timeout_s
        in_use = [url] if names_store(self._run, url, manifests, self._config.keep_versions) else []
        listed = listed_files(self._run, [url], timeout_s=timeout_s, in_use=in_use)[url]
        if isinstance(listed, str):
            event(logger, "weight_files_left", level=logging.WARNING, reason=f"{shown(url)}: not listed: {listed}")
            return
        self.incomplete = frozenset(incomplete(self._run, url, listed, manifests, self._config.keep_versions))
        left = left_behind(self._run, listed, manifests, self._config.keep_versions, unreadable=unreadable)
        for name in left:
            file = parsed(self._run, name)
            if file is not None and file.whole and file.version > self._latest and self._is_young(listed[name]):
                self._reusable[name] = listed[name]
        remove_expired((self.url(name) for name in left if name not in self._reusable), self._config)

    def _version(self, name: str) -> int:
        file = parsed(self._run, name)
        return -1 if file is None else file.version


class _Writing(NamedTuple):
    """One version that is being written."""

    writer: FileWriter
    version: int
    codec: str
    ended: threading.Event
    problems: dict[int, str]
    """Last problem of each chunk, by number."""

    def chunk(self, numbered: tuple[int, bytes]) -> Chunk:
        """Write a piece of the content, and retry until the store has it."""
        index, piece = numbered
        data = compress(piece) if self.codec else piece
        digest = blake3(data).hexdigest()
        name = file_name(self.writer.run, self.version, index, digest)
        delay_s = FIRST_DELAY_S
        while not self.ended.is_set():
            try:
                self.writer.store(name, data, digest)
                self.problems.pop(index, None)
                break
            except (StoreError, OSError) as error:
                self.problems[index] = f"chunk {index}: {fault_of(error)}"
            self.ended.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return Chunk(
            index=index,
            partition=-1,
            offset=-1,
            size_bytes=len(data),
            digest=digest,
            codec=self.codec,
            content_bytes=len(piece),
            url=self.writer.url(name),
        )
