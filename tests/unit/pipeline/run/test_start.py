"""The start of a run: lengths are compared before anything is trained, and roles that need the learner wait for it."""

import os

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.process.role_process import READY_VARIABLE
from rollstream.pipeline.roles import infer
from rollstream.pipeline.run.learner_start import check_lengths
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded


def check(*flags: str) -> None:
    config = load(flags=flags)
    check_lengths(config, environments_of(config))


def test_rows_that_hold_the_longest_prompt_and_answer_are_enough() -> None:
    check("learner.sequence_length=12")
    check()


@pytest.mark.parametrize("too_long", ["refuse", "error"])
def test_shorter_rows_are_refused_with_the_length_they_need(too_long: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check("learner.sequence_length=11", f"learner.too_long={too_long}")
    assert "environment dsort3 may have 12 tokens (4 of the longest prompt and 8 of an answer)" in str(refused.value)
    assert "learner.sequence_length, 11; set it to 12" in str(refused.value)


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
def test_who_says_what_becomes_of_long_ones_may_start(too_long: str, caplog: pytest.LogCaptureFixture) -> None:
    check("learner.sequence_length=11", f"learner.too_long={too_long}")
    assert "rollouts_may_be_too_long" in caplog.text


@pytest.mark.parametrize(("updates", "warned"), [(12, True), (11, False)])
def test_a_warm_up_that_is_as_long_as_the_run_is_said_at_the_start(
    updates: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check(
        "learner.max_steps=3",
        "learner.epochs=2",
        "learner.minibatches=2",
        f"learner.optimizer.warmup_updates={updates}",
    )
    names = "learner.optimizer.warmup_updates, 12, is not below the 12 updates of learner.max_steps, 3"
    assert (names in str([vars(record) for record in caplog.records])) == warned


class Follower:
    """A follower whose first version is there after so many waits."""

    def __init__(self, waits: int) -> None:
        self.waits = waits

    def wait_for(self, version: int, timeout_s: float) -> None:
        self.waits -= 1
        if self.waits >= 0:
            raise DeadlineExceeded(f"version {version} is not there")


def test_an_inference_server_waits_for_as_long_as_its_supervisor_waits_for_the_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DeadlineExceeded):
        infer.wait_for_version(Follower(2), 0.0)  # type: ignore[arg-type]
    read, write = os.pipe()
    monkeypatch.setenv(READY_VARIABLE, str(write))
    infer.wait_for_version(Follower(2), 0.0)  # type: ignore[arg-type]
    assert os.read(read, 1000) == b"waiting for a policy version that can be fetched\n" * 2
    os.close(read)
    os.close(write)
