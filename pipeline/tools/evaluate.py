"""`rollstream steer evaluate`: lets the run's evaluator evaluate the newest policy version, even if it is not due."""

import argparse

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.control import steering


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream steer evaluate`."""
    set_handler(parser, evaluate, example="rollstream steer evaluate --run main", json=True)


def evaluate(config: RunConfig, args: argparse.Namespace) -> int:
    """Request the evaluation, and print the version."""
    steering.record(config.kafka, config.run, {"command": "evaluate"})
    version = steering.state(config.kafka, config.run)["evaluate_version"]
    if args.json:
        print(compact({"evaluate_version": version}))
    else:
        print(
            f"`rollstream role eval` evaluates version {version} of run {config.run}, unless it has done so before; "
            "start it if the run has none"
        )
    return 0
