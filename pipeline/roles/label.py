"""The role `label`: one process of the labelling stage; scaling is starting more of them under further ordinals."""

import argparse

from consumers.labelling.labels import labeler_of
from consumers.labelling.stage import run_labelling
from pipeline.config import RunConfig
from pipeline.process import announce_ready, stop_on_signals
from topics.errors import ConfigurationError


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Label trajectories until told to stop; or commit lost positions again."""
    if args.labeler == "recover":
        return _recover(config)
    name = args.labeler or config.labelling.labeler
    if not name:
        raise ConfigurationError("no labeler is named; give package.module:function, or set labelling.labeler")
    labeler = labeler_of(name)
    stop = stop_on_signals()
    run_labelling(
        labeler,
        config.kafka,
        config.run,
        config.labelling,
        ordinal=args.ordinal,
        stop=stop,
        on_ready=announce_ready,
    )
    return 0


def _recover(config: RunConfig) -> int:
    from consumers.labelling.recovery import recover

    for partition, position in sorted(recover(config.kafka, config.run, config.labelling).items()):
        print(f"partition {partition}: labelling goes on at offset {position}")
    return 0
