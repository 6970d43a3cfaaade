"""`rollstream ui`: serves a page that shows runs in a browser, both running and finished ones."""

import argparse
import asyncio
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from rollstream.consumers.archive.manifest import runs_of
from rollstream.pipeline.command_line.command_parser import Runs, Setting, config_of_run, set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_ready, run_until_stopped
from rollstream.pipeline.ui.server.page_run import PageRun
from rollstream.pipeline.ui.server.page_server import PageServer
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.stores import open_store
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.wire.catalogue import topic_name


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream ui`."""
    set_handler(parser, ui, example="rollstream ui --run main --port 8090", run_action=Runs)
    parser.add_argument(
        "--archive", metavar="URL", default="", help="show runs of an archive, at a path or a URL, instead of topics"
    )
    parser.add_argument("--host", dest="ui.host=", action=Setting, metavar="HOST", help="address to listen on")
    parser.add_argument("--port", dest="ui.port=", action=Setting, metavar="N", help="port to listen on")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def ui(config: RunConfig, args: argparse.Namespace) -> int:
    """Serve the page until stopped."""
    names = list(dict.fromkeys(getattr(args, "runs", [])))
    if args.archive:
        names = names or _archived(args.archive)
    else:
        names = names or [config.run]
        clients.check_broker(config.kafka)
        for name in names:  # partitions_of raises an error if the run is unknown
            topic_admin.partitions_of(config.kafka, topic_name(name, "rollouts"))
    configs = [config if name == config.run else config_of_run(name, args) for name in names]
    run_until_stopped(lambda stop: _serve(config, configs, args.archive, stop, opens=args.open))
    return 0


def _archived(archive: str) -> list[str]:
    """Return the runs of the archive."""
    held = runs_of(open_store(archive))
    if not held:
        raise ConfigurationError(
            f"{archive} holds no archive of a run; name the folder that `rollstream archive` fills"
        )
    return held


async def _serve(
    config: RunConfig, configs: Sequence[RunConfig], archive: str, stop: asyncio.Event, *, opens: bool
) -> None:
    runs = {one.run: PageRun(one, archive) for one in configs}
    async with PageServer(replace(config.ui, port=max(config.ui.port, 0)), runs) as server:
        print(f"page of {'run' if len(runs) == 1 else 'runs'} {', '.join(runs)}: {server.url}", flush=True)
        announce_ready()
        if opens:
            with suppress(webbrowser.Error):
                await asyncio.to_thread(webbrowser.open, server.url)
        await stop.wait()
