"""The role `fill`: the process that fills a trajectory buffer on disk from the log."""

import argparse
from pathlib import Path

from consumers.buffers.filling import TrajectoryFiller
from consumers.buffers.trajectory_buffer import TrajectoryReplayBuffer
from pipeline.config import RunConfig
from pipeline.process import announce_ready, stop_on_signals
from topics import clients
from topics.errors import ConfigurationError

_POLL_S = 0.2


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Fill until told to stop; the next start goes on from there."""
    fill = config.fill
    if not fill.directory:
        raise ConfigurationError("fill.directory is empty: there is no buffer to fill; set it to where one may lie")
    stop = stop_on_signals()
    clients.check_broker(config.kafka)  # before a directory is made
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
                filler.poll(_POLL_S)
        finally:
            filler.close()
    return 0
