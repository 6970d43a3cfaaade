"""ReplicaUpdater: keeps one inference engine on the newest checkpoint, and never lets it sample with torn weights.

Torn weights are a mix of two versions. An update pauses the engine, loads a checkpoint and resumes the engine. If
loading fails, the updater loads a version that this engine, or else another engine, has loaded before. If that fails
too, the engine is drained: it stays paused, and the update is tried again.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

from rollstream.consumers.serving.checkpoints import ServedCheckpoint, ServedVersions
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EngineFailed, PreparedEngine, ServingEngine, VersionLate, VersionUnfit
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_MOST_DOUBLINGS = 4
UNKNOWN = -1
T = TypeVar("T")


class ReplicaState(StrEnum):
    """State of an engine, as its updater knows it."""

    UNKNOWN = "unknown"
    """The engine has not been updated yet, or no longer reports the version that it was given."""
    SERVING = "serving"
    """The engine samples with a version of the run."""
    DRAINED = "drained"
    """The engine is paused, because its weights may be torn, or it did not resume."""
    UNREACHABLE = "unreachable"
    """The engine does not answer, or answers with an error."""


class ReplicaUpdater:
    """Updates one engine. The engines of a run share their checkpoints, but do not wait for one another."""

    def __init__(self, url: str, engine: ServingEngine, checkpoints: ServedVersions, config: ServingConfig) -> None:
        self.url = url
        self.state = ReplicaState.UNKNOWN
        self.version = UNKNOWN
        """Policy version that the engine samples with; -1 if unknown."""
        self.swaps = self.failures = 0
        """Numbers of updates after which the engine resumed, also with an earlier version, and of attempts that
        failed."""
        self.paused_s = 0.0
        """Time in seconds for which updates have paused the engine."""
        self._engine = engine
        self._checkpoints = checkpoints
        self._config = config
        self._failed: Counter[int] = Counter()
        """Number of failed attempts to load each version."""
        self._setbacks = 0
        """Number of times, since the engine last resumed, that it was drained, or could fetch none of the versions."""
        self._foreign = 0
        """Number of checks in a row in which the engine reported another label than it was given."""

    async def run(self) -> None:
        """Update until cancelled; an update in progress is finished first, but a fetch that precedes it is not."""
        while True:
            target = self._checkpoints.newest
            if target is not None and self._is_due(target):
                # The version is protected from now on, because the update begins only when this coroutine waits.
                with self._checkpoints.using(target):
                    checkpoint = await self._prepared(target)
                    if checkpoint is not None:
                        await _finished(self._update(checkpoint))
            elif self.state is not ReplicaState.UNKNOWN:
                await self._check()
            # A version that was announced during the update is loaded at once.
            await self._checkpoints.wait_newer(UNKNOWN if target is None else target.version, self._pause_s())

    def _is_due(self, target: ServedCheckpoint) -> bool:
        if self.state is not ReplicaState.SERVING:
            return True
        return self.version != target.version and self._failed[target.version] < self._config.attempts

    def _pause_s(self) -> float:
        """Time to wait for a newer version before the engine is checked again.

        It grows while the engine is drained or can fetch no version, and with each update after which the engine
        reports a foreign label.
        """
        doublings = self._setbacks + max(self._foreign - 1, 0)
        return float(self._config.retry_s * 2 ** min(doublings, _MOST_DOUBLINGS))

    async def _check(self) -> None:
        """Ask the engine for its version, because an engine that was restarted has lost the weights of `version`."""
        try:
            label = str(await _ask(self._engine.label()))
        except EngineFailed as error:
            self._unreachable(error)
            return
        self._foreign = 0 if label == str(self.version) else self._foreign + 1
        if self._foreign > self._config.attempts:
            # An engine that was restarted reports the label again after one update.
            event(
                logger,
                "replica_mislabelled",
                level=logging.ERROR,
                url=self.url,
                version=self.version,
                label=label,
                remedy="the engine must report the label that `load` was given; it is updated less often until it does",
            )
        if self._foreign:
            event(
                logger,
                "replica_changed",
                level=logging.WARNING,
                url=self.url,
                version=self.version,
                label=label,
                remedy="the engine is updated again",
            )
            self.state, self.version = ReplicaState.UNKNOWN, UNKNOWN

    async def _update(self, checkpoint: ServedCheckpoint) -> None:
        """Update the engine to a version, or to an earlier version if that fails."""
        began = time.monotonic()
        try:
            await self._swap(checkpoint, began)
        except asyncio.CancelledError:
            event(
                logger,
                "replica_left_paused",
                level=logging.ERROR,
                url=self.url,
                version=checkpoint.version,
                remedy="the process ended during the update, and the engine answers nobody: start it again",
            )
            raise

    async def _swap(self, checkpoint: ServedCheckpoint, began: float) -> None:
        """Pause the engine, load a version or an earlier one, and resume it."""
        try:
            await _ask(self._engine.pause())
        except EngineFailed as error:
            # The weights are unchanged, but the engine may have paused after the timeout, so it is resumed.
            await self._resume_unchanged()
            self._unreachable(error)
            return
        try:
            if await self._load(checkpoint) or await self._restore(checkpoint.version):
                await self._resume(began)
        finally:
            self.paused_s += time.monotonic() - began

    async def _prepared(self, target: ServedCheckpoint) -> ServedCheckpoint | None:
        """Let an engine that fetches versions itself fetch `target`, and return the version that it can load.

        This is an earlier version if `target` is unfit and the engine samples with no version of the run; an engine
        that does continues with it, and the result is None.
        """
        if not isinstance(self._engine, PreparedEngine):
            return target
        checkpoint: ServedCheckpoint | None = target
        while checkpoint is not None:
            try:
                await _ask(self._engine.prepare(str(checkpoint.version)))
                return checkpoint
            except VersionUnfit as error:
                self._failure(checkpoint, error)
                if self.state is ReplicaState.SERVING:
                    return None
                checkpoint = self._checkpoints.earlier(checkpoint.version)
                while checkpoint is not None and self._failed[checkpoint.version] >= self._config.attempts:
                    checkpoint = self._checkpoints.earlier(checkpoint.version)
            except VersionLate as error:
                self._late(checkpoint, error)
                return None
            except EngineFailed as error:
                self._unreachable(error)
                return None
        # Each fetch may read a whole model from the brokers, in parallel with the training.
        self._setbacks += 1
        return None

    def _late(self, checkpoint: ServedCheckpoint, error: EngineFailed) -> None:
        """Count and log an attempt that may succeed later, and does not count as one of serving.attempts."""
        self.failures += 1
        event(
            logger,
            "replica_update_late",
            level=logging.WARNING,
            url=self.url,
            version=checkpoint.version,
            error=str(error),
            again_in_s=self._pause_s(),
        )

    def _failure(self, checkpoint: ServedCheckpoint, error: EngineFailed) -> None:
        """Count and log a failed attempt to bring the engine to a version."""
        self.failures += 1
        self._failed[checkpoint.version] += 1
        event(
            logger,
            "replica_update_failed",
            level=logging.ERROR,
            exc_info=error,
            url=self.url,
            version=checkpoint.version,
            attempt=self._failed[checkpoint.version],
            error=str(error),
        )

    async def _load(self, checkpoint: ServedCheckpoint) -> bool:
        """Load a checkpoint into the paused engine; return whether loading succeeded."""
        began = time.monotonic()
        try:
            await _ask(self._engine.load(checkpoint.directory, str(checkpoint.version)))
        except EngineFailed as error:
            self._failure(checkpoint, error)
            return False
        self.version = checkpoint.version
        self._checkpoints.note_good(checkpoint.version, self.url)
        event(
            logger,
            "replica_loaded",
            level=logging.DEBUG,
            url=self.url,
            version=self.version,
            load_s=round(time.monotonic() - began, 3),
        )
        return True

    async def _restore(self, failed: int) -> bool:
        """Load the newest version that this engine, or else another, has loaded; drain the engine if that fails."""
        self.version = UNKNOWN
        fallback = self._checkpoints.fallback(failed, self.url)
        if fallback is not None:
            with self._checkpoints.using(fallback):
                if await self._fetch(fallback) and await self._load(fallback):
                    event(logger, "replica_restored", level=logging.WARNING, url=self.url, version=fallback.version)
                    return True
        self._drained(f"neither version {failed} nor an earlier version could be loaded")
        return False

    async def _fetch(self, checkpoint: ServedCheckpoint) -> bool:
        """Let an engine that fetches versions itself fetch one, unless it holds it; return whether it can be loaded."""
        if not isinstance(self._engine, PreparedEngine):
            return True
        try:
            await _ask(self._engine.prepare(str(checkpoint.version)))
        except VersionLate as error:
            self._late(checkpoint, error)
            return False
        except EngineFailed as error:
            self._failure(checkpoint, error)
            return False
        return True

    async def _resume(self, began: float) -> None:
        """Let the engine sample with the weights just loaded."""
        try:
            await _ask(self._engine.resume())
        except EngineFailed as error:
            self.failures += 1
            self._drained(f"the engine did not resume: {error}")
            return
        self.swaps += 1
        self._setbacks = 0
        self.state = ReplicaState.SERVING
        paused_s = round(time.monotonic() - began, 3)
        event(logger, "replica_updated", url=self.url, version=self.version, paused_s=paused_s)

    async def _resume_unchanged(self) -> None:
        if self.state is ReplicaState.SERVING:
            with suppress(EngineFailed):  # The next attempt pauses, loads and resumes the engine.
                await _ask(self._engine.resume())

    def _drained(self, reason: str) -> None:
        self._setbacks += 1
        self.state, self.version = ReplicaState.DRAINED, UNKNOWN
        event(
            logger,
            "replica_drained",
            level=logging.ERROR,
            url=self.url,
            reason=reason,
            remedy="the engine stays paused while updates are retried; check its log, or restart it",
        )

    def _unreachable(self, error: EngineFailed) -> None:
        if self.state is not ReplicaState.UNREACHABLE:
            event(logger, "replica_unreachable", level=logging.WARNING, url=self.url, error=str(error))
        # A drained engine that does not answer may come back with torn weights; it is updated before it resumes.
        self.state, self.version = ReplicaState.UNREACHABLE, UNKNOWN
        self._foreign = 0


async def _finished(update: Coroutine[Any, Any, None]) -> None:
    """Await an update; after a cancellation, finish it first."""
    task = asyncio.ensure_future(update)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _ask(call: Awaitable[T]) -> T:
    """Await a call of an engine. Any error of a user's engine becomes EngineFailed, so other engines continue."""
    try:
        return await call
    except EngineFailed:
        raise
    except Exception as error:
        raise EngineFailed(f"{type(error).__name__}: {error}") from error
