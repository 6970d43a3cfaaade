"""EngineFleet: follows the policy versions of a run, and keeps third-party inference engines on the newest one.

A version is fetched, checked against its digests and written whole before any engine pauses for it; engines with our
plug-in fetch and check it themselves, and nothing is written. An engine that fails does not delay the other engines.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

from rollstream.consumers.files.safetensors_files import CheckpointRefused
from rollstream.consumers.serving.checkpoints import CheckpointDirectory, ServedCheckpoint, ServedVersions
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import NAME as PLUGIN
from rollstream.consumers.serving.engines import (
    VLLM_LORA,
    EngineHttp,
    ServingEngine,
    VllmPluginEngine,
    base_url,
    engine_named,
)
from rollstream.consumers.serving.replica_updater import ReplicaState, ReplicaUpdater
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.follower import VersionSource, WholeVersion, check_topics
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.heartbeats import beat, beating
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_POLL_S = 0.2
_LOOK_S = 0.05
_LOOP = "following"
_RECORDS = 500
KEPT = 8
"""Number of announced versions, so that an engine that cannot fetch the newest may load an earlier one."""


class EngineFleet:
    """The engines of `serving.urls`, one event loop, and one thread that fetches."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        config: ServingConfig,
        *,
        directory: Path,
        weights: WeightsConfig | None = None,
        tokenizer: str = "",
    ) -> None:
        """Checkpoints are written to `directory`; `tokenizer` is a checkpoint whose tokenizer is copied into them.

        Raises ConfigurationError if no engine is named, or serving.engine names no kind of engine.
        """
        if not config.urls:
            raise ConfigurationError("no engine is named; give --url http://HOST:PORT, or set serving.urls")
        self._kafka, self._run, self._config = kafka, run, config
        self._directory, self._weights, self._tokenizer = directory, weights, tokenizer
        self._engine: Callable[[EngineHttp], ServingEngine]
        if config.engine == PLUGIN:
            weights = weights or WeightsConfig()
            self._engine = partial(VllmPluginEngine, kafka=kafka, run=run, config=config, weights=weights)
        else:
            self._engine = engine_named(config.engine)
        self._updaters: list[ReplicaUpdater] = []
        self._newest = -1
        self._unwritten = False
        """Whether a checkpoint could not be written, and is tried again."""

    def metrics(self) -> Mapping[str, float]:
        """Return the state of the engines, and totals since the start."""
        states = [updater.state for updater in self._updaters]
        versions = [updater.version for updater in self._updaters if updater.state is ReplicaState.SERVING]
        return {
            "replicas": len(states),
            "serving_replicas": states.count(ReplicaState.SERVING),
            "drained_replicas": states.count(ReplicaState.DRAINED),
            "unreachable_replicas": states.count(ReplicaState.UNREACHABLE),
            "policy_version": min(versions, default=-1),
            "newest_version": self._newest,
            "weight_swaps_total": sum(updater.swaps for updater in self._updaters),
            "failed_updates_total": sum(updater.failures for updater in self._updaters),
            "paused_seconds_total": sum(updater.paused_s for updater in self._updaters),
        }

    async def serve_until(
        self, stop: asyncio.Event, *, on_ready: Callable[[], object], on_wait: Callable[[str], object] = lambda _: None
    ) -> None:
        """Follow the versions until `stop` is set; then finish updates in progress, and begin none.

        `on_ready` is called once the first engine samples with a version of the run, and `on_wait` about every ten
        seconds until then. Raises TopicError or BrokerUnavailable, StoreError if the directory cannot be written at the
        start or another process writes to it, ConfigurationError if the API key cannot be resolved, and
        ConfigurationError or CheckpointRefused if the first version is none that a checkpoint can be made of.
        """
        await asyncio.to_thread(check_topics, self._kafka, self._run)
        async with AsyncExitStack() as stack:
            versions: ServedVersions
            if self._config.engine == PLUGIN:
                versions = ServedVersions(keep_versions=max(KEPT, self._config.keep_versions))
                follow = self._announce_versions(versions, stop)
            else:
                versions = checkpoints = stack.enter_context(self._open_directory())
                follow = self._follow(checkpoints, stop)
            # Two updaters of one engine would resume it while the other one loads.
            for url in dict.fromkeys(map(base_url, self._config.urls)):
                http = await stack.enter_async_context(EngineHttp(url, self._config))
                self._updaters.append(ReplicaUpdater(http.url, self._engine(http), versions, self._config))
            following = asyncio.create_task(follow)
            updating = [asyncio.create_task(updater.run()) for updater in self._updaters]
            announcing = asyncio.create_task(self._announce(on_ready, on_wait))
            stopping = asyncio.create_task(stop.wait())
            try:
                ended, _ = await asyncio.wait([following, stopping, *updating], return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    await task  # Raises the error of the task.
                # Before the version that is being written is announced: an engine that pauses for it would stay paused
                # if this process were killed during the load.
                for task in updating:
                    task.cancel()
                await asyncio.gather(*updating, return_exceptions=True)
                await following
            finally:
                tasks = [following, *updating, announcing, stopping]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _open_directory(self) -> CheckpointDirectory:
        return CheckpointDirectory(
            self._directory,
            keep_versions=self._config.keep_versions,
            template=self._config.template,
            tokenizer=self._tokenizer,
            dtype=self._config.dtype,
            adapters=self._config.engine == VLLM_LORA,
        )

    async def _announce(self, on_ready: Callable[[], object], on_wait: Callable[[str], object]) -> None:
        said_at = time.monotonic()
        while not any(updater.swaps for updater in self._updaters):
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() - said_at > 10.0:
                said_at = time.monotonic()
                on_wait(self._missing())
        on_ready()

    def _missing(self) -> str:
        if self._newest >= 0:
            return "waiting for an engine"
        return "the first checkpoint cannot be written" if self._unwritten else "waiting for a policy version"

    async def _follow(self, checkpoints: CheckpointDirectory, stop: asyncio.Event) -> None:
        stopping = threading.Event()
        source = VersionSource(self._kafka, self._run, config=self._weights, stop=stopping)
        ending = asyncio.ensure_future(stop.wait())
        ending.add_done_callback(lambda _: stopping.set())
        unwritten: WholeVersion | None = None
        due = 0.0
        try:
            while not stop.is_set():
                whole = await beating(_LOOP, asyncio.to_thread(source.poll, _POLL_S))
                if whole is not None:
                    unwritten, due = whole, 0.0
                if unwritten is not None and time.monotonic() >= due:
                    if await beating(_LOOP, self._write(checkpoints, unwritten)):
                        unwritten = None
                    due = time.monotonic() + self._config.retry_s
        finally:
            ending.cancel()
            source.close()

    async def _announce_versions(self, versions: ServedVersions, stop: asyncio.Event) -> None:
        with closing(VersionAnnouncer(self._kafka, self._run)) as announcer:
            while not stop.is_set():
                beat(_LOOP)
                newest = await announcer.poll(versions, _POLL_S)
                self._newest = self._newest if newest is None else newest

    async def _write(self, checkpoints: CheckpointDirectory, whole: WholeVersion) -> bool:
        """Write a version as a checkpoint; return whether it was written, or can never be."""
        manifest, arrays = whole
        began = time.monotonic()
        try:
            checkpoint = await checkpoints.add(manifest, arrays)
        except (StoreError, CheckpointRefused, ConfigurationError) as error:
            self._unwritten = isinstance(error, StoreError)
            if self._newest < 0 and not self._unwritten:
                raise
            event(logger, "checkpoint_failed", level=logging.ERROR, version=manifest.version, error=str(error))
            return not self._unwritten
        self._newest, self._unwritten = manifest.version, False
        event(
            logger,
            "checkpoint_written",
            version=manifest.version,
            directory=str(checkpoint.directory),
            size_bytes=sum(array.nbytes for array in arrays.values()),
            seconds=round(time.monotonic() - began, 3),
        )
        return True


class VersionAnnouncer:
    """Announces the newest version of a run whose weights are on the log."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Open a consumer of the manifests. Raises TopicError or BrokerUnavailable."""
        self._place = topic_name(run, "policies"), 0
        self._policies = TopicFollower(kafka, {self._place: BEGINNING})
        self._latest: list[int] = []
        """The newest versions, in order."""
        self._skipped = SkippedRecords("serve-weights")

    async def poll(self, versions: ServedVersions, wait_s: float) -> int | None:
        """Announce the newest versions that are not announced yet, and return the newest of them, or None.

        The weights of early ones may be gone at the first call. Waits up to `wait_s` for records.
        """
        records = await asyncio.to_thread(self._policies.poll, _RECORDS, wait_s)
        manifests = [manifest for _record, manifest in self._skipped.records(PolicyManifest, records)]
        on_log = {manifest.version for manifest in manifests if manifest.kind != "external"}
        self._latest = sorted({*self._latest, *on_log})[-KEPT:]
        known = -1 if versions.newest is None else versions.newest.version
        new = [version for version in self._latest if version > known]
        if not new or self._place not in self._policies.caught_up:
            return None
        await versions.announce(*(ServedCheckpoint(version, Path()) for version in new))
        return new[-1]

    def close(self) -> None:
        """Close the consumer."""
        self._policies.close()
