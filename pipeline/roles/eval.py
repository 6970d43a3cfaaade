"""The role `eval`: evaluates the held-out split at every k-th policy version, and publishes to `evals`."""

import argparse
import asyncio

from rollstream.pipeline.command_line.command_parser import Setting, set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_progress, announce_ready, run_until_stopped
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.producers.worker.evaluator import run_evaluator
from rollstream.topics.errors import ConfigurationError


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role eval`."""
    set_handler(parser, run, role=True)
    add_number(parser, "evaluator")
    parser.add_argument(
        "--every",
        dest="evaluation.every_versions=",
        action=Setting,
        metavar="K",
        help="evaluate versions that are multiples of K (default: evaluation.every_versions)",
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Evaluate until stopped, then finish evaluations that are due."""
    if not config.evaluation.every_versions:
        raise ConfigurationError("evaluation.every_versions is 0, so no version is evaluated; set it, e.g. to 50")
    environments = [environment for environment in environments_of(config) if environment.evaluated]
    if not environments:
        raise ConfigurationError(
            "no environment is evaluated: set environments.N.evaluate to true for one that computes its own rewards"
        )
    wait_for_broker(config)

    async def evaluate(stop: asyncio.Event) -> None:
        await run_evaluator(
            environments,
            config.kafka,
            config.run,
            config.evaluation,
            config.worker,
            max_calls=config.gateway.max_calls,
            ordinal=args.ordinal,
            stop=stop,
            on_ready=announce_ready,
            on_progress=announce_progress,
        )

    run_until_stopped(evaluate)
    return 0
