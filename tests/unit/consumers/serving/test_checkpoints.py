"""Checkpoints of versions on disk: whole or absent, few, and written by one process."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.files.safetensors_files import CheckpointRefused
from rollstream.consumers.models import huggingface, parameters
from rollstream.consumers.models.adapters import PEFT_CONFIG, PEFT_MODEL, merged
from rollstream.consumers.models.config import LoraConfig, manifest_model
from rollstream.consumers.serving.checkpoints import CheckpointDirectory, ServedCheckpoint, ServedVersions
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.replica_updater import ReplicaUpdater
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.wire.params_digest import params_digest
from tests.support.checkpoints import random_parameters, write_checkpoint, write_tokenizer
from tests.support.serving_engines import ARRAYS, MODEL, EngineStandIn, manifest

Test = Callable[[CheckpointDirectory], Coroutine[Any, Any, None]]


def versions(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("version-")) for path in directory.glob("version-*"))


def run(directory: Path, test: Test, **settings: Any) -> None:
    async def main() -> None:
        with CheckpointDirectory(directory, **({"keep_versions": 2} | settings)) as checkpoints:
            await test(checkpoints)

    asyncio.run(main())


def test_a_version_is_a_checkpoint_with_its_tokenizer_in_the_dtype_asked_for(tmp_path: Path) -> None:
    (tmp_path / "pretrained").mkdir()
    write_tokenizer(tmp_path / "pretrained", ["1 + 1 = 2"])

    async def test(checkpoints: CheckpointDirectory) -> None:
        written = await checkpoints.add(manifest(17), ARRAYS)
        assert written.directory == tmp_path / "served" / "version-17"
        assert huggingface.load_config(written.directory) == MODEL
        loaded = huggingface.load(written.directory)
        assert params_digest(loaded) == params_digest({n: a.astype(ml_dtypes.bfloat16) for n, a in ARRAYS.items()})
        assert (written.directory / "tokenizer.json").exists()

    run(tmp_path / "served", test, tokenizer=str(tmp_path / "pretrained"), dtype="bfloat16")


def test_adapters_are_written_merged_or_alone_as_pefts_files(tmp_path: Path) -> None:
    model = replace(MODEL, lora=LoraConfig(rank=2))
    draw = np.random.default_rng(0)
    shapes = parameters.shapes(model)
    arrays = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    version = replace(manifest(3), model=manifest_model(model))

    async def alone(checkpoints: CheckpointDirectory) -> None:
        written = await checkpoints.add(version, arrays)
        assert sorted(path.name for path in written.directory.iterdir()) == [PEFT_CONFIG, PEFT_MODEL]
        stored = safetensors_files.read(written.directory / PEFT_MODEL)
        assert stored.keys() == {f"base_model.model.{name}" for name in parameters.adapter_shapes(model)}

    async def whole(checkpoints: CheckpointDirectory) -> None:
        written = await checkpoints.add(version, arrays)
        for name, array in huggingface.load(written.directory).items():
            np.testing.assert_array_equal(array, merged(model, arrays)[name])

    run(tmp_path / "alone", alone, adapters=True)
    run(tmp_path / "whole", whole)


def test_the_newest_two_are_kept_and_those_that_are_needed(tmp_path: Path) -> None:
    async def test(checkpoints: CheckpointDirectory) -> None:
        first = await checkpoints.add(manifest(1), ARRAYS)
        checkpoints.note_good(1, "a")
        second = await checkpoints.add(manifest(2), ARRAYS)
        with checkpoints.using(second):
            for version in (3, 4, 5):
                await checkpoints.add(manifest(version), ARRAYS)
            assert versions(tmp_path) == [1, 2, 4, 5], "1 is known to be good, 2 is being loaded"
        assert checkpoints.fallback(5, "a") == first
        assert checkpoints.fallback(5, "b") == first, "b has loaded none itself"
        assert checkpoints.fallback(1, "a") is None
        for version in (4, 5):
            checkpoints.note_good(version, "b")
        own, other = checkpoints.fallback(6, "a"), checkpoints.fallback(6, "b")
        assert own == first
        assert other is not None
        assert other.version == 5
        await checkpoints.add(manifest(6), ARRAYS)
        await checkpoints.add(manifest(7), ARRAYS)
        assert versions(tmp_path) == [1, 5, 6, 7], "a goes back to 1, and b to 5"

    run(tmp_path, test)


def test_the_directory_begins_empty_and_other_files_in_it_stay(tmp_path: Path) -> None:
    (tmp_path / "version-9").mkdir()
    (tmp_path / "version-9.1-abc.unfinished").mkdir()
    (tmp_path / "version-notes").mkdir()

    async def test(checkpoints: CheckpointDirectory) -> None:
        assert checkpoints.newest is None
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["version-notes"]
        with pytest.raises(StoreError, match=rf"another serve-weights writes to {tmp_path}; .*serving\.directory"):
            CheckpointDirectory(tmp_path, keep_versions=2)

    run(tmp_path, test)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    async def test(checkpoints: CheckpointDirectory) -> None:
        with pytest.raises(ConfigurationError, match=r"does not describe a supported model.*serving.template"):
            await checkpoints.add(manifest(0, model="{}"), ARRAYS)
        with pytest.raises(CheckpointRefused, match=r"model\.norm\.weight is missing"):
            await checkpoints.add(manifest(0), {n: a for n, a in ARRAYS.items() if n != "model.norm.weight"})
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
        assert checkpoints.newest is None

    run(tmp_path, test)


def test_parameters_of_another_trainer_are_written_like_a_checkpoint_of_its_model(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    config = write_checkpoint(template, "qwen3-untied")
    write_tokenizer(template, ["1 + 1 = 2"], 300)
    settings = json.loads((template / "config.json").read_text())
    (template / "config.json").write_text(json.dumps({**settings, "model_type": "of_another_architecture"}))
    arrays: dict[str, NDArray[Any]] = {name: array + 1 for name, array in random_parameters(config).items()}

    async def test(checkpoints: CheckpointDirectory) -> None:
        written = await checkpoints.add(manifest(3, model="{}"), arrays)
        assert json.loads((written.directory / "config.json").read_text())["model_type"] == "of_another_architecture"
        assert (written.directory / "tokenizer.json").read_bytes() == (template / "tokenizer.json").read_bytes()
        assert params_digest(huggingface.load(written.directory, config)) == params_digest(arrays)
        # An engine only warns of a missing tensor, and keeps the old one.
        name = next(iter(arrays))
        with pytest.raises(CheckpointRefused, match=f"{name} is missing"):
            await checkpoints.add(manifest(4), {n: a for n, a in arrays.items() if n != name})
        with pytest.raises(CheckpointRefused, match="extra is not one of its tensors"):
            await checkpoints.add(manifest(4), {**arrays, "extra": np.zeros(1)})

    run(tmp_path / "served", test, template=str(template))


ENGINE = "http://engine-0"


class RecordedVersions(ServedVersions):
    """Records which versions were removed; a removal takes time, as that of files does."""

    def __init__(self, keep_versions: int) -> None:
        super().__init__(keep_versions=keep_versions)
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.removed: list[int] = []

    async def remove(self, checkpoint: ServedCheckpoint) -> None:
        self.removed.append(checkpoint.version)
        self.begun.set()
        await self.go_on.wait()


def checkpoint(version: int) -> ServedCheckpoint:
    return ServedCheckpoint(version, Path(f"version-{version}"))


def test_an_engine_falls_back_to_no_version_that_is_about_to_be_removed() -> None:
    async def test() -> None:
        versions = RecordedVersions(keep_versions=1)
        with versions.using(checkpoint(0)), versions.using(checkpoint(1)):
            for version in (0, 1, 2):
                await versions.announce(checkpoint(version))
                versions.note_good(version, ENGINE)
        announcing = asyncio.create_task(versions.announce(checkpoint(3)))
        await versions.begun.wait()
        fallback = versions.fallback(2, ENGINE)
        versions.go_on.set()
        await announcing
        assert sorted(versions.removed) == [0, 1]
        assert fallback is None, "its files are being removed"

    asyncio.run(test())


def test_a_version_that_an_updater_has_chosen_is_not_removed_before_its_engine_loads_it() -> None:
    async def test() -> None:
        versions = RecordedVersions(keep_versions=1)
        versions.go_on.set()
        engine = EngineStandIn()
        engine.hangs.add("pause")
        await versions.announce(checkpoint(0))
        updating = asyncio.create_task(ReplicaUpdater(ENGINE, engine, versions, ServingConfig()).run())
        await asyncio.sleep(0)  # The updater has chosen version 0, and its update has not begun.
        assert engine.calls == []
        await versions.announce(checkpoint(1))
        removed = [*versions.removed]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await updating
        assert removed == []

    asyncio.run(test())
