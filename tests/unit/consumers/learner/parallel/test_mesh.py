"""A step trains the same on any number of devices and processes: parameters agree within 5e-6 after three steps.

Parameters are about 0.1, and three steps of Adam move each by about 0.03; the differences are rounding alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from rollstream.consumers.learner.config import LearnerConfig, MeshConfig
from rollstream.consumers.learner.parallel.mesh import axis_sizes, build_mesh
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models.config import DecoderConfig, LoraConfig
from rollstream.consumers.models.parameters import is_adapter
from rollstream.infra.broker.ports import free_port
from rollstream.topics.errors import ConfigurationError
from tests.support.mesh_child import CONFIG, ROLLOUTS, Job
from tests.support.mesh_child import params as initial_params
from tests.support.paths import ROOT

TOLERANCE = 5e-6
BFLOAT16_TOLERANCE = 1e-2
"""Relative difference of a loss or of a gradient's norm; seen: 2.4e-3."""


def start(job: Job, devices: int) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.mesh_child", msgspec.json.encode(job).decode()],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*children: subprocess.Popen[str]) -> None:
    for child in children:
        _, error = child.communicate(timeout=300)
        assert child.returncode == 0, error


@pytest.fixture(scope="module")
def eight_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, np.ndarray]]:
    out = tmp_path_factory.mktemp("eight") / "out.npz"
    finish(start(Job(out=str(out), layouts=[[1, 1, 1], [1, 2, 2, 2]]), devices=8))
    with np.load(out) as loaded:
        yield dict(loaded)


def params(saved: dict[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    prefix = f"{layout}/params/"
    return {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}


def metrics(saved: dict[str, np.ndarray], layout: str) -> list[dict[str, float]]:
    return [json.loads(str(saved[f"{layout}/metrics/{step}"])) for step in range(len(ROLLOUTS))]


def assert_same(saved: dict[str, np.ndarray], layout: str, expected: dict[str, np.ndarray]) -> None:
    wanted = params(expected, "1x1x1")
    got = params(saved, layout)
    assert got.keys() == wanted.keys() != set()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
    for step, (here, there) in enumerate(zip(metrics(saved, layout), metrics(expected, "1x1x1"), strict=True)):
        for name, value in there.items():
            if name not in ("packing/microbatches", "packing/padding_fraction"):
                assert here[name] == pytest.approx(value, abs=2e-5), (step, name)


def test_eight_devices_train_what_one_does_and_hold_their_share(eight_devices: dict[str, np.ndarray]) -> None:
    """Rows hold several rollouts, which lie across the parts where devices share the tokens."""
    assert_same(eight_devices, "1x2x2x2", eight_devices)
    assert eight_devices["1x2x2x2/held/model.layers.0.mlp.up_proj.weight"] == 1 / 4
    assert eight_devices["1x2x2x2/held/model.norm.weight"] == 1


def by_two_processes(layout: list[int], directory: Path) -> list[dict[str, np.ndarray]]:
    """Arrays that each of two processes of two devices wrote."""
    coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
    outs = [directory / f"{process}.npz" for process in range(2)]
    jobs = [
        Job(out=str(out), layouts=[layout], process=process, processes=2, coordinator=coordinator)
        for process, out in enumerate(outs)
    ]
    finish(*(start(job, devices=2) for job in jobs))
    collected = []
    for out in outs:
        with np.load(out) as arrays:
            collected.append(dict(arrays))
    return collected


@pytest.mark.long
def test_two_processes_of_two_devices_train_what_one_does_with_as_much_padding(
    eight_devices: dict[str, np.ndarray], tmp_path: Path
) -> None:
    for actual in by_two_processes([2, 2, 1], tmp_path):
        assert_same(actual, "2x2x1", eight_devices)
        assert actual["2x2x1/held/model.layers.0.mlp.up_proj.weight"] == 1 / 2
        # Rows are packed over the whole step, not over a half-empty share for each process.
        for own, alone in zip(metrics(actual, "2x2x1"), metrics(eight_devices, "1x1x1"), strict=True):
            assert own["packing/padding_fraction"] == alone["packing/padding_fraction"]


@pytest.mark.long
@pytest.mark.parametrize(("attention", "vocabulary_chunk"), [("auto", 0), ("blocks", 7)])
def test_tokens_are_shared_beside_every_other_axis_and_by_every_implementation(
    attention: Any, vocabulary_chunk: int, tmp_path: Path
) -> None:
    layouts = [[1, 1, 1], [1, 1, 1, 8], [2, 1, 1, 4], [1, 2, 2, 2]]
    outs = [tmp_path / "first.npz", tmp_path / "again.npz"]
    for out in outs:
        job = Job(out=str(out), layouts=layouts, attention=attention, vocabulary_chunk=vocabulary_chunk)
        finish(start(job, devices=8))
    with np.load(outs[0]) as first, np.load(outs[1]) as again:
        for layout in layouts[1:]:
            name = "x".join(str(size) for size in layout)
            assert_same(dict(first), name, dict(first))
            for key, value in params(dict(first), name).items():
                assert np.array_equal(value, params(dict(again), name)[key]), "executed again, it has the same bits"


@pytest.mark.long
def test_the_devices_of_each_of_two_processes_share_the_tokens_of_its_rows(
    eight_devices: dict[str, np.ndarray], tmp_path: Path
) -> None:
    for actual in by_two_processes([2, 1, 1, 2], tmp_path):
        assert_same(actual, "2x1x1x2", eight_devices)


@pytest.mark.long
def test_tokens_of_bfloat16_are_shared_up_to_its_rounding(tmp_path: Path) -> None:
    out, layouts = tmp_path / "out.npz", [[1, 1, 1], [1, 1, 1, 8], [1, 2, 2, 2]]
    finish(start(Job(out=str(out), layouts=layouts, attention="blocks", compute_dtype="bfloat16"), devices=8))
    with np.load(out) as loaded:
        for layout in ("1x1x1x8", "1x2x2x2"):
            for here, there in zip(metrics(dict(loaded), layout), metrics(dict(loaded), "1x1x1"), strict=True):
                for name in ("loss", "optim/grad_norm"):
                    assert here[name] == pytest.approx(there[name], rel=BFLOAT16_TOLERANCE), (layout, name)


@pytest.mark.long
def test_adapters_and_experts_are_trained_where_tokens_are_shared(tmp_path: Path) -> None:
    for part in ({"lora_rank": 2}, {"experts": 4}):
        out, layouts = tmp_path / f"{next(iter(part))}.npz", [[1, 1, 1], [1, 2, 1, 4]]
        finish(start(Job(out=str(out), layouts=layouts, **part), devices=8))
        with np.load(out) as loaded:
            assert_same(dict(loaded), "1x2x1x4", dict(loaded))


@pytest.mark.long
def test_other_layouts_of_eight_devices_train_what_one_does(
    eight_devices: dict[str, np.ndarray], tmp_path: Path
) -> None:
    out = tmp_path / "out.npz"
    layouts = [[8, 1, 1], [1, 8, 1], [2, 2, 2], [2, 2, 1, 2]]
    finish(start(Job(out=str(out), layouts=layouts), devices=8))
    with np.load(out) as loaded:
        for sizes in layouts:
            assert_same(dict(loaded), "x".join(str(size) for size in sizes), eight_devices)


@pytest.mark.long
def test_adapters_of_a_model_in_shares_are_trained_as_on_one_device(tmp_path: Path) -> None:
    out, layouts = tmp_path / "out.npz", [[1, 1, 1], [2, 4, 1], [2, 2, 2]]
    finish(start(Job(out=str(out), layouts=layouts, lora_rank=2), devices=8))
    with np.load(out) as loaded:
        actual = dict(loaded)
    for layout in ("2x4x1", "2x2x2"):
        assert_same(actual, layout, actual)
        assert actual[f"{layout}/held/model.layers.0.mlp.up_proj.weight"] == 1 / 4
    before, after = initial_params(replace(CONFIG.model, lora=LoraConfig(rank=2))), params(actual, "2x4x1")
    for name, value in before.items():
        assert np.array_equal(after[name], value) != is_adapter(name), name


@pytest.mark.long
def test_experts_in_shares_are_trained_as_on_one_device(tmp_path: Path) -> None:
    out, layouts = tmp_path / "out.npz", [[1, 1, 1], [2, 4, 1], [2, 2, 2]]
    finish(start(Job(out=str(out), layouts=layouts, experts=4), devices=8))
    with np.load(out) as loaded:
        actual = dict(loaded)
    for layout in ("2x4x1", "2x2x2"):
        assert_same(actual, layout, actual)
        for name in ("gate", *(f"experts.{expert}.down_proj" for expert in range(4))):
            assert actual[f"{layout}/held/model.layers.0.mlp.{name}.weight"] == 1 / 4


def test_a_mesh_takes_the_devices_there_are() -> None:
    assert axis_sizes(build_mesh(MeshConfig())) == {"data": len(jax.devices()), "fsdp": 1, "sequence": 1, "tensor": 1}


def test_a_mesh_of_another_size_than_there_are_devices_says_both() -> None:
    with pytest.raises(
        ConfigurationError, match=r"data 1 x fsdp 4 x sequence 1 x tensor 1 = 4 devices, but there are 1 \(1 x cpu\)"
    ):
        build_mesh(MeshConfig(fsdp=4), jax.devices()[:1])


def test_rows_that_cannot_be_split_over_the_devices_are_refused() -> None:
    class Four:
        """A stand-in for a mesh, of which only the shape is read."""

        axis_names = ("data", "fsdp", "tensor")
        devices = np.empty((4, 1, 1))

    with pytest.raises(ConfigurationError, match=r"learner.microbatch_rows 6 .* make it a multiple of 4"):
        TrainStep(LearnerConfig(model=DecoderConfig(), microbatch_rows=6), Four())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 66}, r"rows of 66 tokens .* learner.mesh.sequence = 4; make .* multiples of 4"),
        ({"length_buckets": (30,)}, r"rows of 30 tokens"),
        ({"attention": "splash"}, r'learner.attention "splash" cannot be split .* set it to "auto" or "blocks"'),
    ],
)
def test_tokens_that_cannot_be_split_over_the_devices_are_refused(settings: dict[str, Any], message: str) -> None:
    config = replace(LearnerConfig(mesh=MeshConfig(sequence=4), microbatch_rows=8), **settings)
    with pytest.raises(ConfigurationError, match=message):
        TrainStep(config, build_mesh(MeshConfig()))
