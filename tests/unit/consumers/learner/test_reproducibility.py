"""Flags that make a GPU repeat its bits, and how much a step executed again may differ."""

import importlib.util
from dataclasses import replace

import jax
import pytest

from rollstream.consumers.learner import reproducibility
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.reproducibility import (
    fingerprint,
    prepare_environment,
    replay_tolerance,
)

FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch):
    """A function that prepares an environment with these flags, and returns the flags in it."""
    monkeypatch.setenv("NPROC", "2")

    def prepare(flags: str, platforms: str, *, plugin: bool) -> list[str]:
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        real = importlib.util.find_spec
        monkeypatch.setattr(
            reproducibility.importlib.util,
            "find_spec",
            lambda name: plugin or None if name == "jax_cuda12_plugin" else real(name),
        )
        prepare_environment(LearnerConfig(threads=2))
        return reproducibility.os.environ["XLA_FLAGS"].split()

    return prepare


def test_where_jax_may_use_a_gpu_its_operations_are_deterministic_and_no_timing_chooses_kernels(prepared) -> None:
    assert set(FLAGS) <= set(prepared("", "", plugin=True))
    assert set(FLAGS) <= set(prepared("", "cuda,cpu", plugin=True))
    assert not set(FLAGS) & set(prepared("", "cpu", plugin=True))
    assert not set(FLAGS) & set(prepared("", "", plugin=False))


def test_flags_that_a_user_sets_stay(prepared) -> None:
    flags = prepared("--xla_gpu_autotune_level=4", "", plugin=True)
    assert "--xla_gpu_autotune_level=4" in flags
    assert "--xla_gpu_autotune_level=0" not in flags
    assert FLAGS[0] in flags
    assert prepared(" ".join(flags), "", plugin=True) == flags


def test_the_tolerance_is_zero_on_cpus_unless_it_is_set_and_no_part_of_the_fingerprint() -> None:
    config = LearnerConfig()
    assert replay_tolerance(config) == 0.0
    set_by_user = replace(config, replay_tolerance=0.01)
    assert replay_tolerance(set_by_user) == 0.01
    assert fingerprint(set_by_user) == fingerprint(config)


def test_the_fingerprint_names_a_precision_of_matrix_products_that_a_user_sets() -> None:
    plain = fingerprint(LearnerConfig())
    with jax.default_matmul_precision("highest"):
        assert fingerprint(LearnerConfig()) == {**plain, "matmul_precision": "highest"}
