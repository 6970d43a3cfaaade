"""A learner that starts again reads its programs from learner.compile_cache and compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

START = """
import json, sys
from dataclasses import replace
from pathlib import Path
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.models.config import DecoderConfig
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.jax_runtime import prepare_jax

learner = LearnerConfig(
    compile_cache=sys.argv[1], model=DecoderConfig(num_hidden_layers=1), microbatch_rows=4, sequence_length=32
)
prepare_jax(RunConfig(data_dir=Path(sys.argv[2]), learner=learner))
import jax
from collections import Counter
events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rsplit("/", 1)[1]]))
from rollstream.consumers.learner.training.train_step import TrainStep
step = TrainStep(learner)
step.warm_up(step.initial_state())
print(json.dumps({"read": events["cache_hits"], "compiled": events["cache_misses"]}))
"""


def started(cache: Path, data_dir: Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-c", START, str(cache), str(data_dir)],
        cwd=ROOT,
        env={**variables, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def start(cache: Path, data_dir: Path) -> dict[str, int]:
    answer = started(cache, data_dir)
    assert answer.returncode == 0, answer.stderr
    counts: dict[str, int] = json.loads(answer.stdout)
    return counts


@pytest.mark.long
def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    cache, data_dir = tmp_path / "programs", tmp_path / "data"
    first = start(cache, data_dir)
    assert first["compiled"] > 0
    assert any(cache.iterdir())
    assert not data_dir.exists()
    second = start(cache, data_dir)
    assert second == {"read": first["read"] + first["compiled"], "compiled": 0}


def test_a_cache_that_cannot_be_made_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = started(tmp_path / "file" / "programs", tmp_path)
    assert answer.returncode != 0
    last = answer.stderr.splitlines()[-1]
    assert "ConfigurationError: JAX's compile cache cannot be at" in last
    assert "(Not a directory); set learner.compile_cache to a directory that this process may write to" in last
