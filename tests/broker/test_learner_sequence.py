"""A learner whose devices share the tokens of each row: killed, resumed and executed again, it has the same bits."""

import os
import signal

import pytest

from tests.broker.test_learner import finish, steps_of
from tests.support.runs import SMALL_LEARNER, RealRun, with_batches
from tests.support.waiting import eventually

STEPS = 6
SETTINGS: dict[str, object] = {
    **SMALL_LEARNER,
    "learner__max_steps": STEPS,
    "learner__checkpoint__every_steps": 2,
    "learner__checkpoint__keep": 5,
    "learner__mesh__sequence": 2,
    # No policy sampled the batches of the tests.
    "learner__loss__stale_mismatch_limit": 10.0,
    "learner__loss__mismatch_limit": 10.0,
}


@pytest.mark.long
def test_devices_that_share_tokens_make_the_bits_on_record_again(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    run = with_batches(real_run, 2 * STEPS)
    undisturbed = with_batches(run.beside("u"), 2 * STEPS)
    try:
        process = run.start("learn", **SETTINGS)
        eventually(lambda: max(steps_of(run), default=-1) >= 3, 90, "step 3 of 6, checkpoints every 2")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        finish(run, run.start("learn", **SETTINGS))
        finish(undisturbed, undisturbed.start("learn", **SETTINGS))
    finally:
        undisturbed.stop()
    expected, steps = steps_of(undisturbed), steps_of(run)
    assert sorted(steps) == list(range(STEPS + 1))
    assert {step: steps[step].params_digest for step in steps} == {s: r.params_digest for s, r in expected.items()}
    finish(run, run.start("retrain", "--from-step=0", **SETTINGS), 900)
