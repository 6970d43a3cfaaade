"""WeightsFollower: holds one whole policy version whose digests match, and swaps to a newer one when that is complete.

Needs no JAX. A version that cannot be fetched is retried until it or a newer one is held; a version whose chunks are
gone is skipped. The follower never goes back to an older version.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from rollstream.consumers.weights.candidates import VersionCandidates
from rollstream.consumers.weights.chains import ChainBroken, forget
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher, ChunksGone, ChunksLate
from rollstream.consumers.weights.loading import load_version
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest

logger = logging.getLogger(__name__)

State = tuple[int, dict[str, NDArray[Any]]]


class WeightsFollower:
    """The newest whole policy version of a run, kept current by a background thread between `start` and `close`."""

    def __init__(self, kafka: KafkaConfig, run: str, *, config: WeightsConfig | None = None) -> None:
        self._kafka = kafka
        self._run = run
        self._policies_topic = topic_name(run, "policies")
        self._fetch_timeout_s = (config or WeightsConfig()).fetch_timeout_s
        self._candidates = VersionCandidates()
        self._published: dict[int, PolicyManifest] = {}
        """Manifests that a version to come may build on."""
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
        for topic in (self._policies_topic, topic_name(self._run, "weights")):
            topic_admin.partitions_of(self._kafka, topic)
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
        """(version, arrays by name) if the version held is not `version`, else None.

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
        """Wait until the version is at least this, and return the state. Raises DeadlineExceeded, or the error
        that ended the thread."""
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
        start = {(self._policies_topic, 0): BEGINNING}
        try:
            with (
                closing(TopicFollower(self._kafka, start)) as policies,
                closing(ChunkFetcher(self._kafka, self._run)) as fetcher,
            ):
                while not self._stopping.is_set():
                    self._add_candidates(policies.poll(500, 0.05))
                    candidate = self._candidates.next(time.monotonic())
                    if candidate is not None:
                        self._fetch(fetcher, candidate)
        except Exception as error:  # Callers that wait for a version must see any error.
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            event(logger, "following_weights_failed", level=logging.ERROR, error=repr(error))

    def _add_candidates(self, messages: Sequence[KafkaRecord]) -> None:
        """Add versions that are newer than the current one to the candidates."""
        held = self.version
        for _message, manifest in self.skipped.records(PolicyManifest, messages):
            if manifest.kind == "external":
                event(logger, "policy_skipped", version=manifest.version, reason="its weights are not on the log")
            elif manifest.version > held:
                self._candidates.add(manifest)
                self._published[manifest.version] = manifest
        forget(self._published, held if held >= 0 else self._candidates.oldest)

    def _fetch(self, fetcher: ChunkFetcher, manifest: PolicyManifest) -> None:
        """Fetch a version and swap to it; keep the version held if it cannot be fetched whole."""
        started = time.monotonic()
        try:
            arrays = load_version(
                fetcher,
                self._published,
                manifest.version,
                held=(self.version, self._arrays),
                timeout_s=self._fetch_timeout_s,
                stop=self._stopping,
            )
        except ChunksLate as late:
            if not self._stopping.is_set():
                again_s = self._candidates.delay(manifest.version, time.monotonic())
                event(
                    logger,
                    "policy_put_off",
                    level=logging.WARNING,
                    version=manifest.version,
                    reason=str(late),
                    again_in_s=again_s,
                )
            return
        except (ChainBroken, ChunksGone, WeightsRefused) as error:
            # Another attempt would read the same log, and fail again.
            self._candidates.drop(manifest.version)
            refused = isinstance(error, WeightsRefused)
            event(
                logger,
                "policy_refused" if refused else "policy_skipped",
                level=logging.ERROR if refused else logging.INFO,
                version=manifest.version,
                reason=str(error),
            )
            return
        self._candidates.drop_up_to(manifest.version)
        with self._changed:
            self._manifest, self._arrays = manifest, arrays
            self._changed.notify_all()
        event(
            logger,
            "policy_followed",
            version=manifest.version,
            step=manifest.step,
            fetch_s=round(time.monotonic() - started, 4),
        )
