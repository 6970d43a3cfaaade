"""Follows a run's policy versions: whoever asks sees one whole version whose digests match, or still the one before.

Needs no JAX. A version that cannot be had is tried again until it is held or a newer one is; one whose chunks are gone
is skipped, and going back to an older one is refused.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, Message, TopicPartition
from numpy.typing import NDArray

from consumers.weights.candidates import Candidates
from consumers.weights.config import WeightsConfig
from consumers.weights.fetcher import ChunkFetcher, ChunksGone, ChunksLate
from consumers.weights.layout import WeightsRefused, assemble
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded
from topics.following import TopicFollower
from topics.logs import event
from topics.records import PolicyManifest
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)

State = tuple[int, dict[str, NDArray[Any]]]


class WeightsFollower:
    """The newest whole policy version of a run, kept current by a thread of its own between `start` and `close`."""

    def __init__(self, kafka: KafkaConfig, run: str, *, config: WeightsConfig | None = None) -> None:
        self._kafka = kafka
        self._run = run
        self._policies_topic = topic_name(run, "policies")
        self._fetch_timeout_s = (config or WeightsConfig()).fetch_timeout_s
        self._candidates = Candidates()
        self._changed = threading.Condition()
        self._manifest: PolicyManifest | None = None
        self._arrays: dict[str, NDArray[Any]] = {}
        self._failure: Exception | None = None
        self.skipped = SkippedRecords("weights-follower")
        """Records of policies that could not be read."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="weights-follower", daemon=True)

    def start(self) -> Self:
        """Begin following. Raises TopicError or BrokerUnavailable at once where there is nothing to follow."""
        for topic in (self._policies_topic, topic_name(self._run, "weights")):
            clients.partitions_of(self._kafka, topic)
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
        """(version, arrays by name) if another version than `version` is held, else None.

        The arrays are read-only and stay valid for as long as they are referenced. Raises what ended the following.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._manifest is None or self._manifest.version == version:
                return None
            return self._manifest.version, self._arrays

    def wait_for(self, version_at_least: int, timeout_s: float) -> State:
        """The state once its version is at least that. Raises DeadlineExceeded, or what ended the following."""
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
        start = TopicPartition(self._policies_topic, 0, OFFSET_BEGINNING)
        try:
            with (
                closing(TopicFollower(self._kafka, [start])) as policies,
                closing(ChunkFetcher(self._kafka, self._run)) as fetcher,
            ):
                while not self._stopping.is_set():
                    self._take_in(policies.poll(500, 0.05))
                    candidate = self._candidates.next(time.monotonic())
                    if candidate is not None:
                        self._try(fetcher, candidate)
        except Exception as error:  # whatever it is, those who wait for a version must hear of it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            event(logger, "following_weights_failed", level=logging.ERROR, error=repr(error))

    def _take_in(self, messages: Sequence[Message]) -> None:
        """Have the versions that are newer than the one held tried."""
        held = self.version
        for _message, manifest in self.skipped.records(PolicyManifest, messages):
            if manifest.kind == "external":
                event(logger, "policy_skipped", version=manifest.version, reason="its weights are not on the log")
            elif manifest.version > held:
                self._candidates.add(manifest)

    def _try(self, fetcher: ChunkFetcher, manifest: PolicyManifest) -> None:
        """Fetch a version and swap to it, or stay where we are if it cannot be had whole."""
        started = time.monotonic()
        try:
            chunks = fetcher.fetch(manifest, timeout_s=self._fetch_timeout_s, stop=self._stopping)
            arrays = assemble(manifest, chunks)
        except ChunksLate as late:
            if not self._stopping.is_set():
                again_s = self._candidates.put_off(manifest.version, time.monotonic())
                event(
                    logger,
                    "policy_put_off",
                    level=logging.WARNING,
                    version=manifest.version,
                    reason=str(late),
                    again_in_s=again_s,
                )
            return
        except (ChunksGone, WeightsRefused) as error:
            # The log keeps what it holds: neither is mended by another try.
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
        self._candidates.held(manifest.version)
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
