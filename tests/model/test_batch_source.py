"""Batches that a learner selects on a real broker after it replaced another learner, or after it was started again."""

import threading
from contextlib import closing

import numpy as np

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import StepPlan
from rollstream.consumers.learner.input.step_loader import BatchSource
from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun


def with_batches_of(run: RealRun, *versions: int) -> RealRun:
    """A run of ten versions, published after the steps of their numbers, with a batch of 16 rollouts of each given."""
    run.prepare()
    for version in range(1, 11):
        run.publish_version(version)
    send_batches(run.kafka, run.name, [random_batch(n, version=version) for n, version in enumerate(versions)])
    return run


def plans(config: LearnerConfig, run: RealRun, position: int, count: int) -> list[StepPlan]:
    """The next plans of a learner that starts at a position of the index, as if after step 0."""
    with StepRecorder(config, run.kafka, run.name, "{}") as recorder:
        if recorder.recorded(0) is None:
            recorder.record(0, (), 0, {}, StepParams("digest", {"w": np.zeros(2, np.float32)}), LearnerPosition())
        with closing(BatchSource(config, run.kafka, run.name, position, 0, recorder)) as source:
            planned = [source.plan(step, threading.Event()) for step in range(count)]
    return [plan for plan in planned if plan is not None]


def test_a_learner_that_replaces_another_skips_the_old_batches_of_its_history(real_run: RealRun) -> None:
    run = with_batches_of(real_run, 0, 7, 8, 10)
    config = LearnerConfig(name="new", take_over=True, rollouts_per_step=32, max_policy_lag=2)
    for _start in range(2):
        [plan] = plans(config, run, 0, 1)
        assert [(use.use, use.reason) for use in plan.uses] == [
            ("skipped", "policy version 0 is 10 steps old, max_policy_lag is 2"),
            ("skipped", "policy version 7 is 3 steps old, max_policy_lag is 2"),
            ("trained", ""),
            ("trained", ""),
        ]
        assert plan.lags == (2, 0)


def test_a_side_learner_that_is_started_again_skips_what_it_would_have_skipped(real_run: RealRun) -> None:
    """No learner of the input run has steps on record."""
    source = with_batches_of(real_run, 0, 9, 1, 8)
    side = real_run.beside("side").prepare()
    config = LearnerConfig(name="side", take_over=True, input_run=source.name, rollouts_per_step=16, max_policy_lag=2)
    first = plans(config, side, 0, 3)
    assert [[use.use for use in plan.uses] for plan in first] == [["trained"], ["trained"], ["skipped", "trained"]]
    [again] = plans(config, side, first[1].position, 1)
    assert again.uses == first[2].uses
