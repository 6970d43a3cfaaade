"""The role `eval`: evaluates the held-out split at regular intervals of policy versions, and publishes to `evals`."""

import argparse
import asyncio
import logging
from collections.abc import Sequence

from rollstream.pipeline.command_parser import Setting, set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.environments import environments_of
from rollstream.pipeline.run.role_process import announce_ready, run_until_stopped
from rollstream.producers.environment_loading import LoadedEnvironment
from rollstream.producers.evaluator import run_evaluator
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


def evaluated(environments: Sequence[LoadedEnvironment]) -> list[LoadedEnvironment]:
    """Return the environments that evaluations play; those that call the policy themselves are left out, and said."""
    agents = [environment.name for environment in environments if environment.agent is not None]
    if agents:
        event(logger, "environments_not_evaluated", level=logging.WARNING, environments=agents)
    return [e for e in environments if e.entry.evaluate and e.agent is None]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream eval`."""
    set_handler(parser, run, role=True)
    parser.add_argument(
        "--every",
        dest="evaluation.every_versions=",
        action=Setting,
        metavar="K",
        help="versions that K divides (default: none)",
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Evaluate until stopped, then finish evaluations that are due."""
    if not config.evaluation.every_versions:
        raise ConfigurationError("evaluation.every_versions is 0: nothing is due; set it, e.g. to 50")
    environments = evaluated(environments_of(config))
    if not environments:
        raise ConfigurationError(
            "no environment is evaluated: set environments.N.evaluate of one that exchanges texts to true"
        )
    clients.check_broker(config.kafka)

    async def evaluate(stop: asyncio.Event) -> None:
        await run_evaluator(
            environments, config.kafka, config.run, config.evaluation, config.worker, stop=stop, on_ready=announce_ready
        )

    run_until_stopped(evaluate)
    return 0
