"""How a command is added to the command line: the flags all of them take, and a handler imported when it runs."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config import RunConfig

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    Handler = Callable[[RunConfig, argparse.Namespace], int]


def add_command(
    commands: "Commands", name: str, handler: str, summary: str, *, example: str = "", json: bool = False
) -> argparse.ArgumentParser:
    """Add a command whose handler is `module:function`, with the flags every command takes."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}" if example else None,
    )
    common = parser.add_argument_group("configuration")
    common.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the run's settings")
    common.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, e.g. grouping.batch_rollouts=64"
    )
    common.add_argument("--run", dest="run=", metavar="NAME", help="name of the run, before the topics' names")
    common.add_argument(
        "-b",
        "--bootstrap-servers",
        dest="kafka.bootstrap_servers=",
        metavar="HOST:PORT",
        help="the brokers' addresses",
    )
    common.add_argument(
        "-X", dest="client", action="append", default=[], metavar="KEY=VALUE", help="a key of librdkafka's, untouched"
    )
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_lazily(handler))
    return parser


def _lazily(handler: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from importlib import import_module

        from topics import logs

        config = config_of(args)
        # A tool's output is for whoever asked; what a role does is for its log.
        quiet = config.log_level == "info" and not getattr(args, "role", False)
        logs.setup("warning" if quiet else config.log_level)
        module, _, function = handler.partition(":")
        call: Handler = getattr(import_module(module), function)
        return call(config, args)

    return run


def config_of(args: argparse.Namespace) -> "RunConfig":
    """The configuration that the flags of a command, the environment and its file make together."""
    from pipeline.config import load

    # Flags of a command that stand for settings are stored under `KEY=`.
    flags = [f"{name}{value}" for name, value in vars(args).items() if name.endswith("=") and value is not None]
    path = args.config or getattr(args, "file", None) or getattr(args, "default_config", None)
    return load(path, environment=os.environ, flags=[*flags, *args.set], client_flags=args.client)
