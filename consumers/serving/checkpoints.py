"""Checkpoints of policy versions on disk, each written atomically and removed once no engine needs it.

Only one process at a time writes to a directory. It first deletes the checkpoints it finds there, because they may
belong to another run.
"""

import asyncio
import os
import re
import shutil
import uuid
from collections.abc import Mapping
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
from rollstream.consumers.models.adapters import save_merged, save_peft
from rollstream.consumers.models.config import DecoderConfig, decoder_config
from rollstream.consumers.serving.served_versions import ServedCheckpoint, ServedVersions
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import PolicyManifest

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
