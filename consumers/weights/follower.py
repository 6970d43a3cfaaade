"""WeightsFollower: holds one whole policy version whose digests match, and swaps to a newer one once it is complete.

It does not need JAX. A version that cannot be fetched is retried until it or a newer version is held; a version whose
chunks are gone is skipped. The follower never goes back to an older version.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.chains import ChainBroken, forget, load_version
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest
from rollstream.topics.traces.stages import version_loaded
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)

State = tuple[int, dict[str, NDArray[Any]]]
_MOST = 8
"""Maximum number of candidates; publishers keep few versions, so the chunks of older versions are gone."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0


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


class VersionCandidates:
    """Versions to fetch, each with the time at which it is due."""

    def __init__(self) -> None:
        self._manifests: dict[int, PolicyManifest] = {}
        self._due: dict[int, float] = {}
        self._delays: dict[int, float] = {}

    @property
    def oldest(self) -> int:
        """The lowest version, -1 if there is none."""
        return min(self._manifests, default=-1)

    def add(self, manifest: PolicyManifest) -> None:
        """Add a version that is due at once; if there are too many versions, the oldest is dropped."""
        self._manifests[manifest.version] = manifest
        self._due[manifest.version] = 0.0
        self._delays[manifest.version] = _FIRST_DELAY_S
        if len(self._manifests) > _MOST:
            self.drop(min(self._manifests))

    def next(self, now: float) -> PolicyManifest | None:
        """Return the newest version that is due, None if there is none."""
        due = [version for version, at in self._due.items() if at <= now]
        return self._manifests[max(due)] if due else None

    def delay(self, version: int, now: float) -> float:
        """Delay a version, longer at each call; return the delay in seconds."""
        delay_s = self._delays[version]
        self._due[version] = now + delay_s
        self._delays[version] = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s

    def drop(self, version: int) -> None:
        """Remove a version."""
        for by_version in (self._manifests, self._due, self._delays):
            by_version.pop(version, None)

    def drop_up_to(self, version: int) -> None:
        """Remove a version and all older versions."""
        for older in [other for other in self._manifests if other <= version]:
            self.drop(older)
