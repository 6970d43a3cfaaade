"""Sources of rollouts, by their names in `learner.source`."""

from collections.abc import Callable

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.replay_source import ReplaySource
from rollstream.consumers.learner.input.step_loader import BatchSource, StepSource
from rollstream.consumers.learner.records.step_recorder import StepRecorder
from rollstream.topics.config import KafkaConfig


def open_source(
    config: LearnerConfig,
    kafka: KafkaConfig,
    run: str,
    step: int,
    position: int,
    process: int,
    recorder: StepRecorder | None,
    drained: Callable[[], bool],
) -> StepSource:
    """Open the source as it was after `step` steps, at `position` of the index; only the lead has a recorder.
    `drained` tells whether grouping has nothing more to deliver."""
    if config.source == "rollout_buffer":
        return ReplaySource(config, kafka, run, step, position, process, recorder, drained)
    return BatchSource(config, kafka, run, position, process, recorder, drained)
