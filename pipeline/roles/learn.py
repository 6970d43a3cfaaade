"""The role `learn`: one learner, warm-started on the environments' examples of their formats."""

import argparse
import threading

from rollstream.pipeline.command_parser import Setting, set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.environments import environments_of
from rollstream.pipeline.process_number import add_number
from rollstream.pipeline.roles.following_control import end_with_split
from rollstream.pipeline.roles.jax_runtime import ending_at_once, prepare_jax
from rollstream.pipeline.run.length_checks import check_lengths
from rollstream.pipeline.run.role_process import announce_progress, announce_ready, stop_on_signals
from rollstream.pipeline.run.warm_start import warm_start_examples
from rollstream.topics.kafka import clients


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream learn`."""
    set_handler(parser, run, role=True)
    add_number(parser, "process of learner.processes", "--process")
    parser.add_argument(
        "--warm-start",
        dest="learner.warm_start.file=",
        action=Setting,
        metavar="FILE",
        help="supervised examples to train on before version 0",
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Train until the last step, or until the lead process is stopped, and write a checkpoint."""
    check_lengths(config, environments_of(config))
    if args.process == 0:  # the other processes follow this one
        end_with_split(config.kafka, config.run)
    clients.check_broker(config.kafka)
    prepare_jax(config)
    from rollstream.consumers.learner.learner import learn
    from rollstream.consumers.learner.parallel.team import join

    stop = threading.Event()

    def ready() -> None:
        # Before the role is ready there is nothing to drain, so a signal ends the process at once.
        stop_on_signals(stop)
        announce_ready()

    team = join(config.learner, args.process)
    with ending_at_once(team.processes, args.debug):
        learn(
            config.learner,
            config.kafka,
            config.run,
            warm_start_examples=lambda: warm_start_examples(config),
            stop=stop,
            team=team,
            on_ready=ready,
            on_progress=announce_progress,
        )
    return 0
