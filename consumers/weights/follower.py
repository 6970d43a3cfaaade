"""WeightsFollower: holds one whole policy version whose digests match, and swaps to a newer one once it is complete.

It does not need JAX. A version that cannot be fetched is retried until it or a newer version is held; a version whose
chunks are gone is skipped. The follower never goes back to an older version.
"""

import logging
import threading
import time
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.version_source import VersionSource, check_topics
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest
from rollstream.topics.traces.stages import version_loaded
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)

State = tuple[int, dict[str, NDArray[Any]]]


class WeightsFollower:
    """The newest whole policy version of a run, kept current by a background thread between `start` and `close`."""

    def __init__(self, kafka: KafkaConfig, run: str, *, config: WeightsConfig | None = None) -> None:
        self._kafka = kafka
        self._run = run
        self._policies_topic = topic_name(run, "policies")
        self._config = config
        self._changed = threading.Condition()
        self._manifest: PolicyManifest | None = None
        self._arrays: dict[str, NDArray[Any]] = {}
        self._failure: Exception | None = None
        self.skipped = SkippedRecords("weights-follower")
        """Records of `policies` that could not be read."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="weights-follower", daemon=True)

    def start(self) -> Self:
        """Begin to follow. Raises TopicError or BrokerUnavailable at once if there is nothing to follow."""
        check_topics(self._kafka, self._run)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop following; the last version stays readable."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The version held, -1 before the first."""
        manifest = self.manifest
        return -1 if manifest is None else manifest.version

    @property
    def manifest(self) -> PolicyManifest | None:
        """Manifest of the version held."""
        with self._changed:
            return self._manifest

    def get_state(self, version: int) -> State | None:
        """Return the held version and its arrays by name; None if no version is held or the held version is `version`.

        The arrays are read-only and stay valid for as long as they are referenced. Raises the error that ended the
        background thread, if any.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._manifest is None or self._manifest.version == version:
                return None
            return self._manifest.version, self._arrays

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """Wait until the version is at least `version_at_least`, and return the state. Raises DeadlineExceeded, or the
        error that ended the thread."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or (self._manifest is not None and self._manifest.version >= version_at_least)
                ),
                timeout_s,
            )
            if self._failure is not None:
                raise self._failure
            if not reached or self._manifest is None:
                held = -1 if self._manifest is None else self._manifest.version
                raise DeadlineExceeded(
                    f"policy version {version_at_least} did not appear on {self._policies_topic} within "
                    f"{timeout_s:g} s (newest: {held}); is the learner running?"
                )
            return self._manifest.version, self._arrays

    def _follow(self) -> None:
        try:
            source = VersionSource(
                self._kafka, self._run, config=self._config, skipped=self.skipped, stop=self._stopping
            )
            with source:
                began_ns = time.time_ns()
                while not self._stopping.is_set():
                    whole = source.poll()
                    if whole is not None:
                        version_loaded(self._run, whole[0], max(began_ns, int(whole[0].created * 1e9)))
                        with self._changed:
                            self._manifest, self._arrays = whole
                            self._changed.notify_all()
        except Exception as error:  # Callers that wait for a version must see any error.
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            event(logger, "following_weights_failed", level=logging.ERROR, error=repr(error))
