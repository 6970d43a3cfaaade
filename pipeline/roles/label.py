"""The role `label`: one process of the labeling stage. To scale, start more processes with the next ordinals."""

import argparse

from rollstream.consumers.labeling.config import JUDGE, LabelingConfig
from rollstream.consumers.labeling.labeler import Labeler, labeler_of
from rollstream.consumers.labeling.process import run_labeling
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_ready, stop_on_signals
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.topics.errors import ConfigurationError


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role label`."""
    set_handler(
        parser,
        run,
        example="rollstream role label rewards.grasping:judge --run robot",
        role=True,
        serves=lambda args: args.labeler != "recover",
    )
    parser.add_argument(
        "labeler",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="function that takes a Trajectory and returns it labeled, or None; or takes a Rollout and returns its "
        "reward (default: labeling.labeler); judge: ask a model; recover: commit lost positions again, and exit",
    )
    add_number(parser, "labeler")


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Label until stopped, or recover lost positions."""
    if args.labeler == "recover":
        return _recover(config)
    name = args.labeler or config.labeling.labeler
    if not name:
        raise ConfigurationError("no labeler is named; give package.module:function, or set labeling.labeler")
    labeler = judge_of(config.labeling) if name == JUDGE else labeler_of(name)
    stop = stop_on_signals()
    wait_for_broker(config)
    run_labeling(
        labeler,
        config.kafka,
        config.run,
        config.labeling,
        ordinal=args.ordinal,
        stop=stop,
        environment_keys=config.grouping.keys_by_environment,
        on_ready=announce_ready,
    )
    return 0


def judge_of(config: LabelingConfig) -> Labeler:
    """Return the labeler `judge`. Its HTTP client is imported only if it is used."""
    from rollstream.consumers.labeling.judge import Judge

    return Judge(config.judge)


def _recover(config: RunConfig) -> int:
    from rollstream.consumers.labeling.positions import recover

    for partition, position in sorted(recover(config.kafka, config.run, config.labeling).items()):
        print(f"partition {partition}: labeling goes on at offset {position}")
    return 0
