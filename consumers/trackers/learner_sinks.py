"""Trackers that are also sinks of a learner's metrics: TensorBoard and Weights & Biases get figures without traces."""

from rollstream.consumers.learner.records.metric_sinks import (
    MetricSink,
    TensorBoardSink,
    WeightsAndBiasesSink,
    sink_package,
)
from rollstream.consumers.learner.records.metric_sinks_config import SinksConfig
from rollstream.consumers.trackers.tracker import TrackedRun, TrackedStep
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import LearnerStep


class SinkTracker:
    """Passes the figures of steps to a metric sink."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self.last = sink.last

    def write(self, step: TrackedStep) -> None:
        self._sink.write(
            LearnerStep(
                learner=step.learner,
                step=step.step,
                input_run=step.run,
                uses=(),
                position=-1,
                policy_version=step.policy_version,
                params_digest="",
                trained_total=0,
                skipped_total=0,
                metrics=step.metrics,
                timestamp=step.timestamp,
            )
        )

    def close(self) -> None:
        self._sink.close()


def tensorboard_tracker(tracked: TrackedRun) -> SinkTracker:
    """Events for TensorBoard below {directory}/{run}/{learner}."""
    package = sink_package("tensorboardX", "tracker.to")
    return SinkTracker(TensorBoardSink(package, tracked.directory / tracked.run / tracked.learner, tracked.newest_step))


def wandb_tracker(tracked: TrackedRun) -> SinkTracker:
    """A run of Weights & Biases below {directory}; offline unless the option `mode` is online."""
    package = sink_package("wandb", "tracker.to")
    mode = tracked.config.options.get("mode", "offline")
    if mode not in ("offline", "online"):
        raise ConfigurationError(f"tracker.options.mode is {mode!r}; it must be offline or online")
    config = SinksConfig(
        wandb=str(tracked.directory),
        wandb_project=tracked.config.project,
        wandb_mode="online" if mode == "online" else "offline",
    )
    return SinkTracker(WeightsAndBiasesSink(package, config, tracked.run, tracked.learner, tracked.newest_step))
