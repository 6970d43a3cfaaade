"""`rollstream env serve`: runs an environment for the workers and evaluators of any run, which name it by its URL."""

import argparse
import asyncio

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import run_until_stopped
from rollstream.pipeline.run.run_environments import NAME_HELP, environment_named
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.tasks.environment_server import EnvironmentServer
from rollstream.topics.secrets import resolve


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream env serve`."""
    set_handler(parser, run, example="rollstream env serve my_game.py:MyGame --port 8200")
    parser.add_argument("environment", metavar="NAME", help=NAME_HELP)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8200, metavar="N", help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--api-key", default="", metavar="REFERENCE", help="key that others must present, as env:NAME or file:PATH"
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Serve until stopped."""
    environment, key = environment_named(config, args.environment), resolve("--api_key", args.api_key)
    run_until_stopped(lambda stop: _serve(environment, args.host, args.port, key, stop))
    return 0


async def _serve(environment: LoadedEnvironment, host: str, port: int, key: str, stop: asyncio.Event) -> None:
    async with EnvironmentServer(environment, host=host, port=port, key=key) as server:
        print(f"environment {environment.name}: {server.url}", flush=True)
        await stop.wait()
