"""Versions that engines can load: the newest versions, versions to fall back to, and versions in use.

Use it from one event loop. A version that no engine needs any longer is removed.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServedCheckpoint:
    """A policy version that engines load."""

    version: int
    directory: Path
    """Directory of the version's files in Hugging Face's layout; if engines fetch versions themselves, unused (`.`)."""


class ServedVersions:
    """The versions of a run that engines load, and which engine has loaded which version."""

    def __init__(self, *, keep_versions: int) -> None:
        """`keep_versions` is as in ServingConfig."""
        self._keep_versions = keep_versions
        self._checkpoints: dict[int, ServedCheckpoint] = {}
        self._uses: Counter[int] = Counter()
        self._good: dict[str, set[int]] = {}
        """Versions that each engine has loaded."""
        self._changed = asyncio.Condition()

    @property
    def newest(self) -> ServedCheckpoint | None:
        """The newest version; None before the first."""
        return self._checkpoints[max(self._checkpoints)] if self._checkpoints else None

    async def announce(self, *checkpoints: ServedCheckpoint) -> None:
        """Offer versions to the engines, and remove versions that are no longer needed."""
        async with self._changed:
            self._checkpoints |= {checkpoint.version: checkpoint for checkpoint in checkpoints}
            self._changed.notify_all()
        newest = sorted(self._checkpoints)[-self._keep_versions :]
        loaded = (version for engine in self._good for version in self._good_ones(engine)[:1])
        needless = self._checkpoints.keys() - {*newest, *loaded, *(+self._uses)}
        # All are taken out before the first removal is awaited, so that no engine begins to load one of them meanwhile.
        for old in [self._checkpoints.pop(version) for version in needless]:
            await self.remove(old)

    async def remove(self, checkpoint: ServedCheckpoint) -> None:
        """Release the storage of a version that is no longer needed; subclasses override it."""

    async def wait_newer(self, version: int, timeout_s: float) -> None:
        """Wait until there is a newer version than `version`, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.newest is not None and self.newest.version > version)

    def note_good(self, version: int, engine: str) -> None:
        """Note that the engine at this URL has loaded a version."""
        self._good.setdefault(engine, set()).add(version)

    def fallback(self, failed: int, engine: str) -> ServedCheckpoint | None:
        """Return the newest version that this engine has loaded, or else the newest that another engine has loaded.

        The `failed` version is left out. Returns None if there is no other version.
        """
        others = (version for other in self._good for version in self._good_ones(other))
        good = (*self._good_ones(engine), *sorted(others, reverse=True))
        return next((self._checkpoints[version] for version in good if version != failed), None)

    def earlier(self, version: int) -> ServedCheckpoint | None:
        """Return the newest version before `version`; None if there is none."""
        return self._checkpoints.get(max((known for known in self._checkpoints if known < version), default=-1))

    @contextmanager
    def using(self, checkpoint: ServedCheckpoint) -> Iterator[Path]:
        """Protect a version from removal within this context; yield the directory of the version."""
        self._uses[checkpoint.version] += 1
        try:
            yield checkpoint.directory
        finally:
            self._uses[checkpoint.version] -= 1

    def _good_ones(self, engine: str) -> list[int]:
        """Versions that an engine has loaded and that have not been removed, newest first."""
        return sorted(self._good.get(engine, set()) & self._checkpoints.keys(), reverse=True)
