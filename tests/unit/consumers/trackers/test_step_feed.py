"""Steps for trackers are a function of the log: the same figures and traces whenever it is read."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from rollstream.consumers.archive.log_source import ArchiveSource
from rollstream.consumers.trackers.step_feed import StepFeed
from rollstream.topics.files.stores import open_store
from tests.support.archived_run import LEARNER, ROWS, archive_run, rollout_of, step_of


def feed_of(root: Path, traces: int = 3) -> StepFeed:
    return StepFeed(partial(ArchiveSource, open_store(str(root))), "main", LEARNER, traces)


def test_a_step_carries_its_own_figures_and_the_newest_ones_of_other_components(tmp_path: Path) -> None:
    archive_run(tmp_path, 3)
    steps = list(feed_of(tmp_path).steps(-1))
    assert [step.step for step in steps] == [0, 1, 2]
    assert [step.metrics["loss"] for step in steps] == [1.0, 0.5, 1 / 3]
    # The metrics are appended every 3 s, and the steps at 9, 19 and 29 s.
    assert [step.metrics["infer-0/tokens_per_s"] for step in steps] == [3.0, 6.0, 9.0]


def test_traces_are_rollouts_of_the_step_as_they_are_on_the_log(tmp_path: Path) -> None:
    archive_run(tmp_path, 2)
    feed = feed_of(tmp_path)
    for step in feed.steps(-1):
        assert len(step.traces) == 3
        for trace in step.traces:
            number = int(trace.metadata["place"].removeprefix("0:"))
            assert number // ROWS == step.step
            subject = rollout_of(number)
            assert [m["content"] for m in trace.messages] == [f"question {number}", f"answer {number}"]
            assert [m["role"] for m in trace.messages] == ["user", "assistant"]
            expected = {
                "uid": subject.uid, "reward": subject.reward, "environment": "env", "policy_version": step.step,
                "fate": "trained", "batch": f"0-{step.step}", "step": step.step,
                "reward_components": {"exact": subject.reward},
            }  # fmt: skip
            assert {name: trace.metadata[name] for name in expected} == expected
            assert isinstance(trace.metadata["advantage"], float)
            [span] = trace.spans
            assert (span["kind"], span["duration_ms"], span["usage"]) == (
                "generation",
                250.0,
                {"input_tokens": 3, "output_tokens": 3},
            )
    assert feed.missing_rollouts == 0


def test_a_feed_goes_on_where_it_ended_and_a_later_one_gives_the_same(tmp_path: Path) -> None:
    archive_run(tmp_path, 2)
    feed = feed_of(tmp_path)
    first = list(feed.steps(-1))
    assert list(feed.steps(1)) == []
    archive_run(tmp_path, 5)
    rest = list(feed.steps(1))
    assert [step.step for step in first + rest] == [0, 1, 2, 3, 4]
    assert list(feed_of(tmp_path).steps(-1)) == first + rest
    assert list(feed_of(tmp_path).steps(2)) == rest[1:]


def test_a_step_that_was_executed_again_is_given_once_as_it_was_executed_last(tmp_path: Path) -> None:
    archive_run(tmp_path, 3, [step_of(2, loss=7.0), step_of(0, learner="other")])
    feed = feed_of(tmp_path, traces=0)
    steps = list(feed.steps(-1))
    assert [(step.step, step.metrics["loss"], step.traces) for step in steps] == [
        (0, 1.0, ()),
        (1, 0.5, ()),
        (2, 7.0, ()),
    ]
    assert feed.learners == {LEARNER, "other"}


def test_a_step_that_only_skipped_batches_so_far_is_given_once_it_is_made(tmp_path: Path) -> None:
    """Its record has no figures yet, and the tracker takes each step once."""
    uses = tuple(replace(use, use="skipped") for use in step_of(2).uses)
    skipping = replace(step_of(2), params_digest="", policy_version=-1, metrics={}, uses=uses)
    archive_run(tmp_path, 2, [skipping])
    feed = feed_of(tmp_path)
    assert [step.step for step in feed.steps(-1)] == [0, 1]
    archive_run(tmp_path, 2, [skipping, step_of(2)])
    assert [(step.step, step.metrics["loss"]) for step in feed.steps(1)] == [(2, 1 / 3)]
