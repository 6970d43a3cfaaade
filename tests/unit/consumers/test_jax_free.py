"""What processes do not import: JAX in tools and servers, an HTTP client in a learner; threads are set before JAX."""

import os
import subprocess
import sys

from tests.support.paths import ROOT

JAX_FREE = (
    "rollstream.consumers.models.config",
    "rollstream.consumers.models.tokenizer",
    "rollstream.consumers.models.tokenizer",
    "rollstream.consumers.models.huggingface",
    "rollstream.consumers.models.tokenizer_file",
    "rollstream.consumers.learner.config",
    "rollstream.consumers.learner.reproducibility",
    "rollstream.consumers.learner.training.packing",
    "rollstream.consumers.learner.pretrained",
    "rollstream.consumers.weights.step_log",
    "rollstream.consumers.learner.input.batch_selection",
    "rollstream.consumers.learner.checkpoint_paths",
    "rollstream.consumers.learner.input.replay_selection",
    "rollstream.consumers.buffers.rollouts.buffer",
    "rollstream.consumers.buffers.trajectories.dataset",
    "rollstream.consumers.buffers.trajectories.buffer",
    "rollstream.consumers.buffers.trajectories.filler",
    "rollstream.consumers.labeling.process",
    "rollstream.consumers.buffers.slices.human_in_the_loop",
    "rollstream.consumers.weights.follower",
    "rollstream.consumers.weights.publisher",
    "rollstream.consumers.weights.state_manager",
    "rollstream.consumers.batch_reader",
    "rollstream.consumers.trainers.step_writer",
    "rollstream.consumers.grouping.process.grouping_process",
    "rollstream.topics.kafka.provisioning",
    "rollstream.producers.worker.worker_process",
    "rollstream.producers.inference.server",
    "rollstream.pipeline.command_line.cli",
    "rollstream.pipeline.launch.demo",
    "rollstream.pipeline.launch.run",
    "rollstream.pipeline.roles.env",
    "rollstream.pipeline.roles.group",
)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**{k: v for k, v in os.environ.items() if k != "NPROC"}, "PYTHONPATH": str(ROOT / "src"), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_these_modules_are_imported_without_jax() -> None:
    imports = "; ".join(f"import {module}" for module in JAX_FREE)
    result = python(f"import sys; {imports}; sys.exit('jax' in sys.modules)")
    assert result.returncode == 0, result.stderr


PREPARE = "from rollstream.consumers.learner.reproducibility import prepare_environment as p, LearnerConfig as c"


def test_threads_are_set_before_jax_is_imported() -> None:
    result = python(f"{PREPARE}; import os, sys; p(c(threads=3)); sys.exit(os.environ['NPROC'] != '3')")
    assert result.returncode == 0, result.stderr


def test_threads_that_come_too_late_are_an_error_and_the_same_ones_are_fine() -> None:
    result = python(f"import jax; {PREPARE}; p(c(threads=3)); p(c(threads=4))", NPROC="3")
    assert "JAX is already imported and learner.threads 4 cannot take effect" in result.stderr


def test_a_learner_loads_environments_without_an_http_client() -> None:
    learner = "import rollstream.pipeline.roles.learn, rollstream.consumers.learner.learner"
    result = python(f"import sys; {learner}; sys.exit('aiohttp' in sys.modules)")
    assert result.returncode == 0, result.stderr


def test_a_gateway_starts_without_environments_and_workers() -> None:
    """A session waits for the start of a gateway that was killed."""
    unused = "{'rollstream.producers.tasks', 'rollstream.producers.worker', 'rollstream.pipeline.roles.env'}"
    result = python(f"import sys, rollstream.pipeline.roles.gateway; sys.exit(bool({unused} & sys.modules.keys()))")
    assert result.returncode == 0, result.stderr
