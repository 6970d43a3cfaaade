"""Fetches chunks from files, several at a time, and waits for a store that fails temporarily.

A failed read is repeated with growing delays until it succeeds, or until no file has arrived within the time limit. A
file that is missing, or whose size or digest in the store is wrong, is given up, because another read does not help.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rollstream.consumers.files.atomic_files import StoreError
from rollstream.consumers.files.stores import Store, check_mounted, fault_of, open_store, shown
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused
from rollstream.consumers.weights.file_names import place_of
from rollstream.consumers.weights.parallel import abandoned_threads, in_parallel
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Chunk, PolicyManifest

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
MOST_ABANDONED = 32
"""Number of reads that never returned, in this process, at which no further read begins."""
_POLL_S = 0.05
_HEALED = (
    "the next full version replaces it (every learner.weights.anchor_every versions), and a learner that is started "
    "again publishes one at once"
)
_AGAIN = (
    "check the store, and the credentials in this process's environment; raise learner.weights.fetch_timeout_s if the "
    "store is slow"
)


def fetch_files(
    manifest: PolicyManifest,
    chunks: Sequence[Chunk],
    take: Callable[[Chunk, bytes], object],
    *,
    at_once: int,
    timeout_s: float,
    stop: threading.Event | None = None,
    on_chunk: Callable[[Chunk], object] = lambda _chunk: None,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Pass each chunk to `take`, on the thread that read it, in any order; `take` checks the digest.

    `on_chunk` is called for each chunk that arrives, and `on_wait` while none arrives, both on the caller's thread.

    Raises ChunksGone if a file is missing, WeightsRefused if it is damaged, and ChunksLate if none arrived for
    `timeout_s` or `stop` was set. These errors name the URL. An error from `take` also ends the fetch and is raised.
    """
    reading = _Reading(manifest, [take], _stores(chunks), threading.Event(), {})
    left, deadline = len(chunks), time.monotonic() + timeout_s

    def check() -> None:
        on_wait()
        stopped = stop is not None and stop.is_set()
        if stopped or time.monotonic() > deadline:
            problem = next(iter(list(reading.problems.values())), f"{shown(chunks[0].url)}: no answer")
            raise ChunksLate(
                f"{left} of {len(chunks)} files of policy version {manifest.version} have not arrived; none arrived "
                f"for {timeout_s:g} s; {problem}; {_AGAIN}"
            )

    try:
        # Each attempt on a store that hangs leaves threads, so that without a limit, a follower that tries again and
        # again would fill the process with them.
        while abandoned_threads() >= MOST_ABANDONED:
            check()
            reading.ended.wait(_POLL_S)
        for chunk in in_parallel(chunks, reading.fetch, min(at_once, left), check=check, ended=reading.ended):
            left, deadline = left - 1, time.monotonic() + timeout_s
            on_chunk(chunk)
            if stop is not None and stop.is_set():
                check()
    finally:
        reading.take.clear()


def _stores(chunks: Sequence[Chunk]) -> Mapping[str, Store]:
    """Open the store of every chunk in the caller's thread, because file systems keep connections for each thread."""
    try:
        return {root: open_store(root) for root in {place_of(chunk.url)[0] for chunk in chunks}}
    except ConfigurationError as error:
        # The fault is in this process, not in the version, which can be read once the missing package is installed.
        raise ChunksLate(str(error)) from error


class _Reading(NamedTuple):
    """The files of one version that are being read."""

    manifest: PolicyManifest
    take: list[Callable[[Chunk, bytes], object]]
    """The function that takes files; empty once the fetch has ended, so that a thread whose read never returns does not
    keep the memory of the version."""
    stores: Mapping[str, Store]
    ended: threading.Event
    problems: dict[str, str]
    """Last problem of each file, by URL."""

    def fetch(self, chunk: Chunk) -> Chunk:
        """Read a file until it is whole, and pass it to `take`."""
        delay_s, mismatched = FIRST_DELAY_S, False
        while not self.ended.is_set():
            try:
                data = self._read(chunk)
            except (ChunksGone, WeightsRefused):
                raise
            except (StoreError, OSError) as error:
                self.problems[chunk.url] = f"{shown(chunk.url)}: {fault_of(error)}"
            else:
                if not self.take:
                    break
                try:
                    self.take[0](chunk, data)
                    self.problems.pop(chunk.url, None)
                    return chunk
                except WeightsRefused as refused:
                    if mismatched:
                        raise WeightsRefused(
                            f"{shown(chunk.url)} is damaged: {refused}; {_HEALED} if this file is deleted before"
                        ) from refused
                    # Read the file once more, because the bytes may have been damaged in transit.
                    mismatched = True
            self.ended.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return chunk

    def _read(self, chunk: Chunk) -> bytes:
        """Read a file. Raises ChunksGone, WeightsRefused, and StoreError or OSError if it cannot be read now."""
        root, name = place_of(chunk.url)
        store, version = self.stores[root], self.manifest.version
        try:
            data = store.read(name)
            if len(data) == chunk.size_bytes:
                return data
            stored = store.size_bytes(name)
        except FileNotFoundError as error:
            check_mounted(store, name.split("/")[0])  # Publishers make a folder for each run.
            raise ChunksGone(
                f"{shown(chunk.url)}, chunk {chunk.index} of policy version {version}, is missing; {_HEALED}"
            ) from error
        if stored != chunk.size_bytes:
            raise WeightsRefused(
                f"{shown(chunk.url)}, chunk {chunk.index} of policy version {version}, has {stored} bytes "
                f"instead of {chunk.size_bytes}; {_HEALED}"
            )
        raise OSError(f"{len(data)} of {chunk.size_bytes} bytes arrived")
