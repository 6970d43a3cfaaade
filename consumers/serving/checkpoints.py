"""Checkpoints of policy versions on disk, each written atomically and removed once no engine needs it.

Only one process at a time writes to a directory. It first deletes the checkpoints it finds there, because they may
belong to another run.

Use `ServedVersions` from one event loop.
"""

import asyncio
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.adapters import save_merged, save_peft
from rollstream.consumers.models.config import DecoderConfig, decoder_config
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import (
    UNFINISHED,
    StoreError,
    lock_directory,
    remove_unfinished,
    sync_directory,
)
from rollstream.topics.records import PolicyManifest


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


_NAME = re.compile(r"version-\d+")
_LOCK = ".serving.lock"
_REMEDY = "set serving.template to a checkpoint of the same model"
_ADAPTERS_REMEDY = (
    "a template does not describe adapters: give StepWriter the model, or set serving.engine to vllm and "
    "serving.template to a checkpoint of the same model"
)


class CheckpointDirectory(ServedVersions, Closing):
    """The checkpoints of a run that engines load. Use it from one event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        keep_versions: int,
        template: str = "",
        tokenizer: str = "",
        dtype: str = "",
        adapters: bool = False,
    ) -> None:
        """`template` and `dtype` are as in ServingConfig; `tokenizer` is a directory whose tokenizer is copied. With
        `adapters`, only the adapters are written, as PEFT files; otherwise they are merged into the model.

        Raises StoreError if the directory cannot be written, or another process writes to it.
        """
        super().__init__(keep_versions=keep_versions)
        self._directory = directory.resolve()
        self._template, self._tokenizer, self._dtype = template, tokenizer, dtype or None
        self._adapters = adapters
        try:
            self._lock = lock_directory(self._directory, _LOCK)
        except StoreError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            raise StoreError(
                f"another serve-weights writes to {self._directory}; end it, or set serving.directory to another one"
            ) from error
        remove_unfinished(self._directory)
        for path in self._directory.iterdir():
            if _NAME.fullmatch(path.name):
                shutil.rmtree(path)

    def close(self) -> None:
        """Let another process write to the directory; the checkpoints stay."""
        self._lock.release()

    async def add(self, manifest: PolicyManifest, arrays: Mapping[str, NDArray[Any]]) -> ServedCheckpoint:
        """Write a version, and remove versions that are no longer needed.

        Raises StoreError if the files cannot be written, ConfigurationError if the manifest names no model that can be
        written, or CheckpointRefused if the parameters do not fit the model.
        """
        checkpoint = await asyncio.to_thread(self._write, manifest, arrays)
        await self.announce(checkpoint)
        return checkpoint

    async def remove(self, checkpoint: ServedCheckpoint) -> None:
        """See ServedVersions."""
        await asyncio.to_thread(shutil.rmtree, checkpoint.directory, ignore_errors=True)

    def _write(self, manifest: PolicyManifest, arrays: Mapping[str, NDArray[Any]]) -> ServedCheckpoint:
        directory = self._directory / f"version-{manifest.version}"
        unfinished = self._directory / f"{directory.name}.{os.getpid()}-{uuid.uuid4().hex}{UNFINISHED}"
        try:
            if self._adapters:
                model = _model_of(manifest, _ADAPTERS_REMEDY)
                save_peft(unfinished, model, arrays, base=self._tokenizer, dtype=self._dtype)
            elif self._template:
                huggingface.save_like(self._template, unfinished, arrays, dtype=self._dtype)
            else:
                model = _model_of(manifest, _REMEDY)
                save_merged(unfinished, model, arrays, companions=self._tokenizer, dtype=self._dtype)
            sync_directory(unfinished)
            unfinished.rename(directory)
            sync_directory(self._directory)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"{directory} cannot be written ({reason}); check the free space there") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return ServedCheckpoint(manifest.version, directory)


def _model_of(manifest: PolicyManifest, remedy: str) -> DecoderConfig:
    try:
        return decoder_config(manifest.model)
    except ConfigurationError as error:
        raise ConfigurationError(f"the manifest of policy version {manifest.version}: {error}; {remedy}") from error
