"""The role `env`: one environment worker, playing the run's task within the capacity rule."""

import argparse
import asyncio
import uuid
from dataclasses import replace

from pipeline.config import RunConfig
from pipeline.process import announce_ready, run_until_stopped
from producers.tasks import create_task
from producers.worker import run_worker


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Produce until told to stop, then finish or cancel the groups in flight."""
    run_until_stopped(lambda stop: _work(config, args.ordinal, stop))
    return 0


async def _work(config: RunConfig, ordinal: int, stop: asyncio.Event) -> None:
    announce_ready()
    await run_worker(
        create_task(config.task, config.tasks),
        config.kafka,
        config.run,
        replace(config.worker, worker_id=f"env-{ordinal}"),
        incarnation=uuid.uuid4().hex[:8],
        capacity=config.capacity,
        stop=stop,
    )
