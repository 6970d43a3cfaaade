"""What tools and servers import of the consumers must not bring JAX in; threads are set before it comes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
JAX_FREE = (
    "consumers.models.config",
    "consumers.models.tokenizer",
    "consumers.models.errors",
    "consumers.models.huggingface",
    "consumers.models.tokenizer_file",
    "consumers.learner.config",
    "consumers.learner.environment",
    "consumers.learner.packing",
    "consumers.learner.pretrained",
    "consumers.learner.step_log",
    "consumers.learner.intake",
    "consumers.learner.checkpoint_paths",
    "consumers.learner.replay",
    "consumers.buffers.rollout_buffer",
    "consumers.buffers.trajectory_dataset",
    "consumers.buffers.trajectory_buffer",
    "consumers.buffers.filling",
    "consumers.labelling.stage",
    "consumers.buffers.episode_hil",
    "consumers.weights.follower",
    "consumers.weights.publisher",
    "consumers.weights.state_manager",
    "consumers.batch_reader",
    "consumers.step_writer",
)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**{k: v for k, v in os.environ.items() if k != "NPROC"}, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


def test_these_modules_are_imported_without_jax() -> None:
    imports = "; ".join(f"import {module}" for module in JAX_FREE)
    result = python(f"import sys; {imports}; sys.exit('jax' in sys.modules)")
    assert result.returncode == 0, result.stderr


PREPARE = "from consumers.learner.environment import prepare_environment as p, LearnerConfig as c"


def test_threads_are_set_before_jax_is_imported() -> None:
    result = python(f"{PREPARE}; import os, sys; p(c(threads=3)); sys.exit(os.environ['NPROC'] != '3')")
    assert result.returncode == 0, result.stderr


def test_threads_that_come_too_late_are_an_error_and_the_same_ones_are_fine() -> None:
    result = python(f"import jax; {PREPARE}; p(c(threads=3)); p(c(threads=4))", NPROC="3")
    assert "JAX is already imported and learner.threads 4 cannot take effect" in result.stderr
