"""The same recipe in one process: as many steps as asked, equal rewards for equal seeds, compared with a run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.grouping.core.estimators import ESTIMATORS
from rollstream.consumers.learner.input.packing import TrainingSequence
from rollstream.pipeline.run.one_process import Comparison, StepSpan, comparison_text, over_batches, spans
from tests.support.paths import ROOT

DEMO = ROOT / "pipeline" / "demo.toml"
TRAIN = """
import sys
from pathlib import Path
from dataclasses import replace
from rollstream.pipeline.config import load
from rollstream.pipeline.run.one_process import train
small = ("learner.model.num_hidden_layers=1", "learner.warm_start.steps=2", "learner.rollouts_per_step=32",
         "learner.microbatch_rows=4", "inference.max_rows=64", "grouping.batch_rollouts=8", "worker.group_size=4")
config = load(Path(sys.argv[1]), flags=(f"data_dir={sys.argv[2]}", *small))
ready = []
found = [train(config, 3, lambda: ready.append(True)), train(config, 3), train(replace(config, seed=1), 3)]
assert ready == [True]
print(found)
"""


@pytest.mark.long  # it compiles everything three times
def test_a_run_in_one_process_follows_from_its_seed(tmp_path: Path) -> None:
    # In a process of its own, because this one may already have JAX with another number of threads.
    command = [sys.executable, "-c", TRAIN, str(DEMO), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=DEMO.parents[1])
    assert done.returncode == 0, done.stderr
    first, again, other = json.loads(done.stdout)
    assert len(first) == 3
    assert all(0.0 <= reward <= 1.0 for reward in first)
    assert again == first
    assert other != first


def test_an_estimators_second_stage_is_taken_over_as_many_as_a_batch_holds() -> None:
    def sequence(advantage: float, sampled: int) -> TrainingSequence:
        return TrainingSequence(
            tokens=np.zeros(4, np.int32),
            loss_mask=np.arange(4) >= 4 - sampled,
            advantages=np.full(4, advantage, np.float32),
            generator_log_probs=np.zeros(4, np.float32),
        )

    given = [sequence(*row) for row in ((1.0, 1), (-1.0, 3), (5.0, 2), (2.0, 2), (3.0, 1))]
    actual = over_batches(given, ESTIMATORS["reinforce_pp"], 2)
    # The mean of 1 and -1 with weights 1 and 3 is -0.5, the variance 0.75; a single rollout has no advantage.
    expected = [1.5 / 0.75**0.5, -0.5 / 0.75**0.5, 1.0, -1.0, 0.0]
    for row, advantage in zip(actual, expected, strict=True):
        np.testing.assert_allclose(row.advantages, np.full(4, advantage), rtol=1e-6)
    assert over_batches(given, ESTIMATORS["rloo"], 2) == given


def test_a_version_counts_where_the_step_is_that_it_was_published_after() -> None:
    log = {0: (1, 0.5), 1: (3, 0.3), 8: (2, 2.0), 16: (9, 9.0)}
    actual = spans(16, 1, log, [float(n) for n in range(16)])
    assert len(actual) == 8
    assert actual[0] == StepSpan(first=0, last=1, over_the_log=0.2, one_process=0.5)
    assert actual[4] == StepSpan(first=8, last=9, over_the_log=1.0, one_process=8.5)
    assert actual[7] == StepSpan(first=14, last=15, over_the_log=None, one_process=14.5)
    assert spans(16, 8, {1: (1, 0.25)}, [])[4].over_the_log == 0.25
    assert [(s.first, s.last) for s in spans(3, 1, {}, [1.0, 2.0, 3.0])] == [(0, 0), (1, 1), (2, 2)]


def test_the_text_says_what_a_step_took_on_both_sides() -> None:
    span = StepSpan(first=0, last=9, over_the_log=0.25, one_process=None)
    text = comparison_text(Comparison(steps=10, seconds_over_the_log=20.0, seconds_one_process=5.0, spans=(span,)))
    assert "0-9          0.250         none" in text
    assert "10 steps over the log: 20 s, 2.00 s each, recoveries included" in text
    assert "in one process: 5 s, 0.50 s each" in text
