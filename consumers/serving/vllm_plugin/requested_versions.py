"""RequestedVersions: fetches requested policy versions in a thread, and holds the last version fetched.

Every version is compared with the digests in its manifest. If deltas lead from the held version to the requested one,
only the deltas are fetched. A request returns at once, so an engine can sample while its next version arrives.
"""

import logging
import threading
import time
from contextlib import ExitStack
from typing import NamedTuple

from rollstream.consumers.models.parameters import is_adapter
from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.chains import ChainBroken, forget, load_version
from rollstream.consumers.weights.content import Arrays, ChunksGone, WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_POLL_S = 0.05
NONE = -1


class VersionNotHeld(RollstreamError):
    """A requested policy version has not been fetched."""


class VersionNotMergeable(RollstreamError):
    """A policy version has adapters, which the plug-in does not merge."""


_FINAL = ChainBroken, ChunksGone, WeightsRefused, VersionNotMergeable
"""Errors after which another attempt would read the same bytes, and fail again."""


class FetchStatus(NamedTuple):
    """Progress of the latest request."""

    requested: int
    """Version of the latest request; -1 before the first."""
    held: int
    """Version that is held; -1 before the first."""
    error: str
    """Why the requested version cannot be fetched; empty while it is being fetched, and once it is held."""
    final: bool = False
    """Whether another attempt would fail, too."""


class HeldVersion(NamedTuple):
    """A policy version whose digests match its manifest."""

    version: int
    arrays: Arrays
    """Arrays by name, read-only."""


class RequestedVersions(Closing):
    """Policy versions of a run, fetched on request. Its methods may be called from any thread."""

    def __init__(self, kafka: KafkaConfig, run: str, *, fetch_timeout_s: float = 60.0, files_at_once: int = 8) -> None:
        """`fetch_timeout_s` limits the wait for the manifest of a version, and for each of its chunks;
        `files_at_once` is the number of files read at a time."""
        self._kafka, self._run = kafka, run
        self._fetch_timeout_s, self._files_at_once = fetch_timeout_s, files_at_once
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._requested, self._pending, self._error, self._final = NONE, False, "", False
        self._held = HeldVersion(NONE, {})
        self._memory = ReusedMemory()
        self._manifests: dict[int, PolicyManifest] = {}
        self._forgotten_below = 0
        """Lowest version whose manifest was kept when earlier ones were forgotten; 0 if none was forgotten."""
        self._skipped = SkippedRecords("vllm-plugin")
        self._thread = threading.Thread(target=self._work, name="rollstream-versions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close its consumers."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def request(self, version: int) -> None:
        """Begin to fetch a version, unless it is held or being fetched. A failed fetch is repeated."""
        with self._changed:
            again = version == self._requested and not self._error
            self._requested, self._error = version, ""
            if version == self._held.version:
                self._pending = False
            elif not again:
                self._pending = True
                self._changed.notify_all()

    def status(self) -> FetchStatus:
        """Return the progress of the latest request."""
        with self._changed:
            return FetchStatus(self._requested, self._held.version, self._error, self._final)

    def take(self, version: int) -> HeldVersion:
        """Return the held version. Raises VersionNotHeld if it is not `version`."""
        with self._changed:
            if self._held.version != version:
                reason = self._error or "request it first, and wait until it is held"
                raise VersionNotHeld(f"policy version {version} of run {self._run} is not held: {reason}")
            return self._held

    def _work(self) -> None:
        with ExitStack() as stack:
            readers: tuple[TopicFollower, ChunkFetcher] | None = None
            while (version := self._next()) is not None:
                error, final = "", False
                if version < self._forgotten_below:
                    # Its manifest was forgotten for a later version, and the follower is past it.
                    stack.close()
                    readers = None
                    self._forget_all()
                try:
                    if readers is None:
                        place = (topic_name(self._run, "policies"), 0)
                        policies = stack.enter_context(TopicFollower(self._kafka, {place: BEGINNING}))
                        readers = (
                            policies,
                            stack.enter_context(
                                ChunkFetcher(self._kafka, self._run, files_at_once=self._files_at_once)
                            ),
                        )
                    arrays = self._fetch(version, *readers)
                except Exception as failure:  # The thread must continue, and report why the version is missing.
                    named = isinstance(failure, RollstreamError)
                    error = str(failure) if named else f"{type(failure).__name__}: {failure}"
                    final = isinstance(failure, _FINAL)
                    mistake = None if named else failure
                    event(
                        logger,
                        "version_not_fetched",
                        level=logging.ERROR,
                        exc_info=mistake,
                        version=version,
                        error=error,
                    )
                    reading = readers is not None and isinstance(failure, VersionNotHeld) and not readers[0].caught_up
                    if version not in self._manifests and not reading:
                        # The next request reads all manifests again, because the follower may have failed for good.
                        stack.close()
                        readers = None
                        self._forget_all()
                with self._changed:
                    # The held version may have been requested again during the fetch; then it stays.
                    if not error and self._requested != self._held.version:
                        self._held = HeldVersion(version, arrays)
                    if version == self._requested:
                        self._error, self._final = error, final

    def _next(self) -> int | None:
        """Wait for a request for a version that is not held, and return the version; return None after `close`."""
        with self._changed:
            while not self._stop.is_set():
                self._changed.wait_for(lambda: self._pending or self._stop.is_set())
                self._pending = False
                if self._requested != self._held.version and not self._stop.is_set():
                    return self._requested
            return None

    def _forget_all(self) -> None:
        self._manifests.clear()
        self._forgotten_below = 0

    def _fetch(self, version: int, policies: TopicFollower, fetcher: ChunkFetcher) -> Arrays:
        deadline = time.monotonic() + self._fetch_timeout_s
        while version not in self._manifests:
            for _record, manifest in self._skipped.records(PolicyManifest, policies.poll(500, _POLL_S)):
                self._manifests[manifest.version] = manifest
            # Here and not after the fetch, because a run may have many manifests, and fetches may fail again and again.
            before = len(self._manifests)
            forget(self._manifests, version)
            if len(self._manifests) < before:
                self._forgotten_below = min(self._manifests)
            if self._stop.is_set() or time.monotonic() > deadline:
                topic = topic_name(self._run, "policies")
                raise VersionNotHeld(f"policy version {version} did not appear on {topic}")
        if any(is_adapter(tensor.name) for tensor in self._manifests[version].tensors):
            raise VersionNotMergeable(
                f"policy version {version} has adapters, which this plug-in does not merge; set serving.engine to "
                '"vllm-lora" or "vllm"'
            )
        began = time.monotonic()
        arrays = load_version(
            fetcher,
            self._manifests,
            version,
            held=self._held,
            timeout_s=self._fetch_timeout_s,
            stop=self._stop,
            memory=self._memory,
        )
        event(logger, "version_fetched", version=version, seconds=round(time.monotonic() - began, 3))
        return arrays
