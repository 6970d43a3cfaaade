"""A vision-language model of transformers learns from images on the log through the torch trainer."""

import json
import os
import subprocess
from dataclasses import replace

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.records import LearnerStep
from rollstream.topics.records.fates import MISSING_ARRAY
from tests.engines.test_torch_trainer import PYTHON, check_installed
from tests.support.paths import ROOT
from tests.support.runs import RealRun

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
STEPS, SEED, BATCH = 140, 0, 48


def test_a_model_learns_to_count_dots_from_images_on_the_log(run: RealRun) -> None:
    check_installed()
    run.topics = type(run.topics)(partitions=1)
    run.grouping = replace(run.grouping, batch_rollouts=BATCH, max_batch_age_s=3600, max_policy_lag=-1)
    assert run.start("topics", "apply").wait(120) == 0
    run.start("group", "--ordinal", "0")
    store = run.directory / "store"
    words = (run.kafka.bootstrap_servers, run.name, store, run.directory, STEPS, SEED)
    print(f"dots.py with seed {SEED}")
    done = subprocess.run(
        [str(PYTHON), "-P", "-m", "tests.engines.dots", *map(str, words)],
        cwd=run.directory,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    first, last = (sum(part) / 10 for part in (figures["rewards"][:10], figures["rewards"][-10:]))
    print(f"rewards {first:.2f} to {last:.2f}, right {figures['seen']:.2f}, of blank pictures {figures['blank']:.2f}")
    assert first < 0.5
    assert last > 0.75
    assert figures["seen"] > 0.8, "it counts in new pictures"
    assert figures["blank"] < 0.5, "and it does so by looking at them"
    steps = {step.step: step for step in run.read("steps") if isinstance(step, LearnerStep)}
    skipped = {step: sum(use.rows for use in steps[step].uses if use.code == MISSING_ARRAY) for step in steps}
    assert {step for step, rows in skipped.items() if rows} == {STEPS}, "the image of a group of the last step was lost"
    proof = ledger(run.kafka, run.name)
    assert (proof.problems, proof.skipped) == ([], skipped[STEPS])
