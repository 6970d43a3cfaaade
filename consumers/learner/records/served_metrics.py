"""The metrics of the newest step, as the learner serves them at /metrics."""

from collections.abc import Sequence

from rollstream.topics.metrics.values import VALUES
from rollstream.topics.records import LearnerStep


def serve(step: LearnerStep) -> None:
    """Serve the metrics of a step that was just recorded."""
    VALUES.record("learn", {"step": step.step})
    if step.policy_version >= 0:  # A step that publishes nothing leaves the newest version as it is.
        VALUES.record("learn", {"policy_version": step.policy_version})
    # Drop the reasons of earlier steps that this step does not name.
    VALUES.keep("learn", "reason", {name.removeprefix("left_out/") for name in step.metrics})
    VALUES.record("learn", step.metrics)


def serve_newest(recorded: Sequence[LearnerStep]) -> None:
    """Serve the newest of the steps on record, given in order, with its time and the newest policy version.

    A learner that resumes may wait long for its first batch, or execute recorded steps again.
    """
    if not recorded:
        return
    VALUES.record("learn", {"step": recorded[-1].step})
    VALUES.put("rollstream_learner_step_timestamp_seconds", recorded[-1].timestamp)
    published = [step.policy_version for step in recorded if step.policy_version >= 0]
    if published:
        VALUES.record("learn", {"policy_version": published[-1]})
