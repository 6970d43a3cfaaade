"""The role `fill`: fills a trajectory buffer on disk from the log."""

import argparse
from pathlib import Path

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import TrajectoryFiller
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_ready, stop_on_signals
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.heartbeats import beat
from rollstream.topics.metrics.values import VALUES

_POLL_S = 0.2


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role fill`."""
    set_handler(parser, run, example="rollstream role fill --run robot --set fill.directory=windows", role=True)


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Fill until stopped; the next start continues where this one stopped."""
    fill = config.fill
    if not fill.directory:
        raise ConfigurationError("fill.directory is empty, so there is no buffer to fill; set it to a directory")
    stop = stop_on_signals()
    wait_for_broker(config)  # before the directory is created
    directory = Path(fill.directory)
    with TrajectoryReplayBuffer(
        fill.seed,
        enable_cache=False,
        auto_save=True,
        auto_save_path=directory,
        trajectory_format=fill.trajectory_format,
        max_trajectories=fill.max_trajectories,
        max_bytes=fill.max_bytes,
    ) as buffer:
        filler = TrajectoryFiller(
            config.kafka, config.run, [buffer], identity_file=directory / "topic.json", name=fill.name
        )
        announce_ready()
        try:
            while not stop.is_set():
                beat("filling")
                filler.poll(_POLL_S)
                VALUES.record("fill", {"added_total": filler.counts.added, "refused_total": filler.counts.refused})
        finally:
            filler.close()
    return 0
