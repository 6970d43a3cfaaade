"""`rollstream evaluate`: has the newest policy version evaluated by the run's evaluator, although it is not due."""

import argparse

from rollstream.pipeline import steering
from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.plain_values import compact


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream evaluate`."""
    set_handler(parser, evaluate, example="rollstream evaluate --run main", json=True)


def evaluate(config: RunConfig, args: argparse.Namespace) -> int:
    """Record the version, and print it."""
    steering.record(config.kafka, config.run, {"command": "evaluate"})
    version = steering.state(config.kafka, config.run)["evaluate_version"]
    if args.json:
        print(compact({"evaluate_version": version}))
    else:
        print(f"version {version} of run {config.run} is evaluated by `rollstream eval`, unless it was before")
    return 0
