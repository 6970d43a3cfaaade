"""The role `eval`: evaluates the held-out split at every so many policy versions, onto `evals`."""

import argparse
import asyncio

from pipeline.config import RunConfig
from pipeline.process import announce_ready, run_until_stopped
from producers.evaluator import run_evaluator
from producers.tasks import create_task
from topics import clients
from topics.errors import ConfigurationError


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Evaluate until told to stop, then what is due still."""
    if not config.evaluation.every_versions:
        raise ConfigurationError("evaluation.every_versions is 0: nothing is due; set it, e.g. to 50")
    task = create_task(config.task, config.tasks)
    clients.check_broker(config.kafka)

    async def evaluate(stop: asyncio.Event) -> None:
        await run_evaluator(
            task, config.kafka, config.run, config.evaluation, config.worker, stop=stop, on_ready=announce_ready
        )

    run_until_stopped(evaluate)
    return 0
