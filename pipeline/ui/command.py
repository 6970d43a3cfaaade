"""`rollstream ui`: serves a page that shows runs in a browser, while they go on and when they are over."""

import argparse
import asyncio
import webbrowser
from dataclasses import replace

from rollstream.pipeline.command_parser import Setting, set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.role_process import announce_ready, run_until_stopped
from rollstream.pipeline.ui.server.page_run import PageRun
from rollstream.pipeline.ui.server.page_server import PageServer
from rollstream.topics.catalogue import topic_name
from rollstream.topics.kafka import clients, topic_admin


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream ui`."""
    set_handler(parser, ui, example="rollstream ui --run main --port 8090")
    parser.add_argument("--host", dest="ui.host=", action=Setting, metavar="HOST", help="address to listen on")
    parser.add_argument("--port", dest="ui.port=", action=Setting, metavar="N", help="port to listen on")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def ui(config: RunConfig, args: argparse.Namespace) -> int:
    """Serve the page until stopped."""
    configs = [config]
    clients.check_broker(config.kafka)
    for one in configs:
        topic_admin.partitions_of(one.kafka, topic_name(one.run, "rollouts"))  # raises the error of an unknown run
    run_until_stopped(lambda stop: _serve(config, configs, stop, opens=args.open))
    return 0


async def _serve(config: RunConfig, configs: list[RunConfig], stop: asyncio.Event, *, opens: bool) -> None:
    runs = {one.run: PageRun(one) for one in configs}
    async with PageServer(replace(config.ui, port=max(config.ui.port, 0)), runs) as server:
        print(f"page of {'run' if len(runs) == 1 else 'runs'} {', '.join(runs)}: {server.url}", flush=True)
        announce_ready()
        if opens:
            await asyncio.to_thread(webbrowser.open, server.url)
        await stop.wait()
