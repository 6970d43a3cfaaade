"""Checkpoints of policy versions on disk: each whole or not there, and old ones removed once no engine needs them.

Only one process at a time writes a directory of checkpoints. It begins with none: those it finds are of unknown runs.
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

from rollstream.consumers.files.atomic_files import (
    UNFINISHED,
    StoreError,
    lock_directory,
    remove_unfinished,
    sync_directory,
)
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import DecoderConfig, decoder_config
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import PolicyManifest

_NAME = re.compile(r"version-\d+")
_LOCK = ".serving.lock"


@dataclass(frozen=True)
class ServedCheckpoint:
    """A policy version as a directory in Hugging Face's layout."""

    version: int
    directory: Path


class CheckpointDirectory(Closing):
    """The checkpoints of a run that engines load; for one event loop."""

    def __init__(
        self, directory: Path, *, keep_versions: int, template: str = "", tokenizer: str = "", dtype: str = ""
    ) -> None:
        """`template` and `dtype` are those of ServingConfig; `tokenizer` is a directory whose tokenizer is copied.

        Raises StoreError if the directory cannot be written, or another process writes it.
        """
        self._directory = directory.resolve()
        self._keep_versions = keep_versions
        self._template, self._tokenizer, self._dtype = template, tokenizer, dtype or None
        self._lock = lock_directory(self._directory, _LOCK)
        remove_unfinished(self._directory)
        for path in self._directory.iterdir():
            if _NAME.fullmatch(path.name):
                shutil.rmtree(path)
        self._checkpoints: dict[int, ServedCheckpoint] = {}
        self._uses: Counter[int] = Counter()
        self._good: set[int] = set()
        self._changed = asyncio.Condition()

    @property
    def newest(self) -> ServedCheckpoint | None:
        """The newest checkpoint; None before the first."""
        return self._checkpoints[max(self._checkpoints)] if self._checkpoints else None

    def close(self) -> None:
        """Let another process write; the checkpoints stay."""
        self._lock.release()

    async def add(self, manifest: PolicyManifest, arrays: Mapping[str, NDArray[Any]]) -> ServedCheckpoint:
        """Write a version, and remove what is no longer needed.

        Raises StoreError if the disk refuses it, ConfigurationError if the manifest names no model that can be
        written, CheckpointRefused if the parameters are not the model's.
        """
        checkpoint = await asyncio.to_thread(self._write, manifest, arrays)
        async with self._changed:
            self._checkpoints[checkpoint.version] = checkpoint
            self._changed.notify_all()
        await self._tidy()
        return checkpoint

    async def wait_newer(self, version: int, timeout_s: float) -> None:
        """Wait until there is a newer checkpoint than `version`, at most that long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.newest is not None and self.newest.version > version)

    def note_good(self, version: int) -> None:
        """Note that an engine has loaded a version."""
        self._good.add(version)

    def fallback(self, failed: int) -> ServedCheckpoint | None:
        """Return the newest version, other than the failed one, that an engine has loaded; None if there is none."""
        return next((self._checkpoints[version] for version in self._good_ones() if version != failed), None)

    @contextmanager
    def using(self, checkpoint: ServedCheckpoint) -> Iterator[Path]:
        """Keep a checkpoint on disk within this context."""
        self._uses[checkpoint.version] += 1
        try:
            yield checkpoint.directory
        finally:
            self._uses[checkpoint.version] -= 1

    def _good_ones(self) -> list[int]:
        """Versions on disk that an engine has loaded, newest first."""
        return sorted(self._good & self._checkpoints.keys(), reverse=True)

    async def _tidy(self) -> None:
        """Remove all checkpoints but the newest, those in use, and one that is known to be good."""
        newest = sorted(self._checkpoints)[-self._keep_versions :]
        for version in self._checkpoints.keys() - {*newest, *self._good_ones()[:1], *(+self._uses)}:
            directory = self._checkpoints.pop(version).directory
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _write(self, manifest: PolicyManifest, arrays: Mapping[str, NDArray[Any]]) -> ServedCheckpoint:
        directory = self._directory / f"version-{manifest.version}"
        unfinished = self._directory / f"{directory.name}.{os.getpid()}-{uuid.uuid4().hex}{UNFINISHED}"
        try:
            if self._template:
                huggingface.save_like(self._template, unfinished, arrays, dtype=self._dtype)
            else:
                huggingface.save(unfinished, _model_of(manifest), arrays, dtype=self._dtype)
                if self._tokenizer:
                    huggingface.copy_companions(self._tokenizer, unfinished)
            sync_directory(unfinished)
            unfinished.rename(directory)
            sync_directory(self._directory)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"{directory} cannot be written ({reason}); look at the space there") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return ServedCheckpoint(manifest.version, directory)


def _model_of(manifest: PolicyManifest) -> DecoderConfig:
    try:
        return decoder_config(manifest.model)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"the manifest of policy version {manifest.version}: {error}; set serving.template to a checkpoint of the "
            "same model"
        ) from error
