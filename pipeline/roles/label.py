"""The role `label`: one process of the labelling stage; scaling is starting more of them under further ordinals."""

import argparse

from consumers.labelling.labels import labeler_of
from consumers.labelling.stage import run_labelling
from pipeline.config import RunConfig
from pipeline.process import announce_ready, stop_on_signals


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Label trajectories until told to stop."""
    labeler = labeler_of(args.labeler)
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
