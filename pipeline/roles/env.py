"""The role `env`: one environment worker, which plays the run's environments under flow control."""

import argparse
import asyncio
import logging
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace

from rollstream.pipeline.command_line.command_parser import Setting, set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig, servers_of
from rollstream.pipeline.deployment.description import ENV
from rollstream.pipeline.process.role_process import announce_ready, run_until_stopped
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.pipeline.run.run_environments import environments_of, played_by
from rollstream.producers.config import WorkerConfig
from rollstream.producers.metrics_publisher import MetricsPublisher
from rollstream.producers.worker.worker_process import run_worker
from rollstream.topics.control.steering import desired_state
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role env`."""
    set_handler(parser, run, role=True)
    add_number(parser, "worker")
    parser.add_argument(
        "--workers",
        dest="supervisor.workers=",
        action=Setting,
        metavar="N",
        help="number of workers that share the work (default: supervisor.workers)",
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Produce until stopped, then finish or cancel the groups in flight."""
    wait_for_broker(config)
    run_until_stopped(lambda stop: _work(config, args.ordinal, stop))
    return 0


async def _work(config: RunConfig, ordinal: int, stop: asyncio.Event) -> None:
    announce_ready()
    while await _play(config, ordinal, stop):
        event(logger, "environments_changed", worker=ordinal)


async def _play(config: RunConfig, ordinal: int, stop: asyncio.Event) -> bool:
    """Play until stopped, or until the worker is to play other environments; return whether it is."""
    state = await asyncio.to_thread(desired_state, config.kafka, config.run)
    wanted = state.numbers.get(ENV)
    name = worker_name(config, ordinal, wanted)
    if state.draining:
        # No group may begin before the drain is withdrawn. A process of this name that was killed would otherwise
        # count as one that plays, and hold up the drain, for a minute after its last metrics.
        async with MetricsPublisher(
            config.kafka, config.run, name, ENV, dict, interval_s=config.worker.metrics_interval_s
        ):
            return False
    plays = [(entry.name, entry.use) for entry in played_by(config, ordinal, state.numbers)]
    environments = environments_of(config, ordinal, state.numbers)
    ended = asyncio.Event()

    def follow(numbers: Mapping[str, int]) -> None:
        if [(entry.name, entry.use) for entry in played_by(config, ordinal, numbers)] != plays:
            ended.set()

    async def end_with(other: asyncio.Event) -> None:
        await other.wait()
        ended.set()

    stopping = asyncio.create_task(end_with(stop))
    await run_worker(
        environments,
        config.kafka,
        config.run,
        replace(config.worker, worker_id=name),
        incarnation=uuid.uuid4().hex[:8],
        group_secret=secrets.token_bytes(16),
        ordinal=ordinal,
        workers=config.supervisor.workers,
        curriculum=config.curriculum,
        capacity=replace(config.capacity, quotas={e.name: e.entry.quota for e in environments if e.entry.quota < 1.0}),
        labeling_group=config.labeling.group_id(config.run),
        servers=servers_of(config),
        gateway=config.gateway,
        follow=follow,
        stop=ended,
    )
    stopping.cancel()
    return ended.is_set() and not stop.is_set()


def worker_name(config: RunConfig, ordinal: int, workers: int | None = None) -> str:
    """Return the name of the worker with this ordinal: env-ORDINAL by default, else the configured name, followed by
    the ordinal if there are several workers. `workers` is the number that operators want; by default, the configured
    number is used."""
    name = config.worker.worker_id
    if name == WorkerConfig().worker_id:
        return f"env-{ordinal}"
    return name if (workers or config.supervisor.workers) == 1 else f"{name}-{ordinal}"
