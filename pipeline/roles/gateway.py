"""The role `gateway`: an address at which any agent can make its model calls, which become rollouts."""

import argparse
import asyncio
from dataclasses import replace

from rollstream.pipeline.command_line.command_parser import Setting, set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig, servers_of
from rollstream.pipeline.process.role_process import (
    announce_progress,
    announce_ready,
    inherited_listener,
    run_until_stopped,
)
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.producers.gateway.gateway_process import run_gateway


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role gateway`."""
    set_handler(parser, run, example="rollstream role gateway --run main --port 8100", role=True)
    add_number(parser, "gateway")
    parser.add_argument("--port", dest="gateway.port=", action=Setting, metavar="N", help="port to listen on")


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Serve until stopped; any other gateway can continue the sessions that agents have begun."""
    wait_for_broker(config)
    run_until_stopped(lambda stop: _serve(config, args.ordinal, stop))
    return 0


async def _serve(config: RunConfig, ordinal: int, stop: asyncio.Event) -> None:
    gateway = config.gateway
    if ordinal:
        gateway = replace(gateway, replica_id=f"{gateway.replica_id}-{ordinal}")

    def on_ready(url: str) -> None:
        print(f"gateway of run {config.run}: {url}", flush=True)
        announce_ready()

    await run_gateway(
        config.kafka,
        config.run,
        gateway,
        config.worker,
        capacity=config.capacity,
        stop=stop,
        on_ready=on_ready,
        on_progress=announce_progress,
        workers=config.supervisor.workers,
        servers=servers_of(config),
        listener=inherited_listener(),
    )
