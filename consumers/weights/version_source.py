"""VersionSource: fetches whole policy versions as they appear on the log, each newer than the previous version.

A version that cannot be fetched is retried until it or a newer version is fetched; a version whose chunks are gone is
skipped. The source holds the version that it returned last, because the next version may build on it.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.candidates import VersionCandidates
from rollstream.consumers.weights.chains import ChainBroken, forget
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.loading import load_version
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)


class WholeVersion(NamedTuple):
    """A policy version whose digests all match its manifest."""

    manifest: PolicyManifest
    arrays: dict[str, NDArray[Any]]
    """Arrays by name, read-only, valid for as long as they are referenced."""


class VersionSource(Closing):
    """Returns the newest whole version of a run whenever there is a newer one. Only one thread may use it."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        config: WeightsConfig | None = None,
        skipped: SkippedRecords | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """`skipped` gets the records of `policies` that cannot be read; `stop` ends a fetch early.

        Raises TopicError or BrokerUnavailable.
        """
        policies = self._place = topic_name(run, "policies"), 0
        config = config or WeightsConfig()
        self._fetch_timeout_s = config.fetch_timeout_s
        self._skipped = skipped or SkippedRecords("weights-follower")
        self._stop = stop or threading.Event()
        self._candidates = VersionCandidates()
        self._published: dict[int, PolicyManifest] = {}
        """Manifests on which a future version may build."""
        self._refused: set[int] = set()
        """Versions that do not match their manifests; versions that build on them are skipped."""
        self._held: tuple[int, dict[str, NDArray[Any]]] = (-1, {})
        self._memory = ReusedMemory()
        with ExitStack() as stack:
            self._policies = stack.enter_context(TopicFollower(kafka, {policies: BEGINNING}))
            self._fetcher = stack.enter_context(ChunkFetcher(kafka, run, files_at_once=config.files_at_once))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the consumers."""
        self._stack.close()

    @property
    def known_versions(self) -> frozenset[int]:
        """Versions whose manifests are in memory, because a version that is yet to be fetched may build on them."""
        return frozenset(self._published)

    def poll(self, wait_s: float = 0.05) -> WholeVersion | None:
        """Return a version newer than all returned before, if one can be fetched; wait up to `wait_s` for a manifest.

        The first version returned is the newest on the log at that time. A fetch has no time limit while its chunks
        arrive. Raises TopicError or BrokerUnavailable.
        """
        self._add_candidates(self._policies.poll(500, wait_s))
        if self._place not in self._policies.caught_up:
            return None  # Manifests may arrive one by one, and fetching versions before the newest would be useless.
        candidate = self._candidates.next(time.monotonic())
        return None if candidate is None else self._fetch(candidate)

    def _add_candidates(self, messages: Sequence[KafkaRecord]) -> None:
        """Add versions that are newer than the held version to the candidates."""
        held = self._held[0]
        for _message, manifest in self._skipped.records(PolicyManifest, messages):
            if manifest.kind == "external":
                event(logger, "policy_skipped", version=manifest.version, reason="its weights are not on the log")
            elif manifest.version > held:
                self._candidates.add(manifest)
                self._published[manifest.version] = manifest
                self._refused.discard(manifest.version)
        # The held version is not enough: while no newer version can be fetched, every further manifest would be kept.
        forget(self._published, max(held, self._candidates.oldest))
        self._refused.intersection_update(self._published)

    def _fetch(self, manifest: PolicyManifest) -> WholeVersion | None:
        """Fetch a version; return None if it cannot be fetched whole."""
        started = time.monotonic()
        try:
            arrays = load_version(
                self._fetcher,
                self._published,
                manifest.version,
                held=self._held,
                refused=self._refused,
                timeout_s=self._fetch_timeout_s,
                stop=self._stop,
                memory=self._memory,
            )
        except ChunksLate as late:
            if not self._stop.is_set():
                again_s = self._candidates.delay(manifest.version, time.monotonic())
                event(
                    logger,
                    "policy_put_off",
                    level=logging.WARNING,
                    version=manifest.version,
                    reason=str(late),
                    again_in_s=again_s,
                )
            return None
        except (ChainBroken, ChunksGone, WeightsRefused) as error:
            # Another attempt would read the same log, and fail again.
            self._candidates.drop(manifest.version)
            refused = isinstance(error, WeightsRefused)
            if refused:
                self._refused.add(manifest.version)
            event(
                logger,
                "policy_refused" if refused else "policy_skipped",
                level=logging.ERROR if refused else logging.INFO,
                version=manifest.version,
                reason=str(error),
            )
            return None
        self._candidates.drop_up_to(manifest.version)
        self._held = manifest.version, arrays
        event(
            logger,
            "policy_followed",
            version=manifest.version,
            step=manifest.step,
            fetch_s=round(time.monotonic() - started, 4),
        )
        return WholeVersion(manifest, arrays)


def check_topics(kafka: KafkaConfig, run: str) -> None:
    """Raise TopicError if a topic that followers read is missing, and BrokerUnavailable if no broker answers."""
    for topic in ("policies", "weights"):
        topic_admin.partitions_of(kafka, topic_name(run, topic))
