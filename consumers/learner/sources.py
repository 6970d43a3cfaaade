"""The sources a learner may take its rollouts from, by the name `learner.source` has for them."""

from consumers.learner.config import LearnerConfig
from consumers.learner.recorder import Recorder
from consumers.learner.replay_source import RolloutBuffer
from consumers.learner.supply import Batches, Source
from topics.config import KafkaConfig


def open_source(
    config: LearnerConfig,
    kafka: KafkaConfig,
    run: str,
    step: int,
    position: int,
    process: int,
    recorder: Recorder | None,
) -> Source:
    """The source as it was after `step` steps, at `position` of the index; only the lead has a recorder."""
    if config.source == "rollout_buffer":
        return RolloutBuffer(config, kafka, run, step, position, process, recorder)
    return Batches(config, kafka, run, position, process, recorder)
