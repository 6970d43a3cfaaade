"""How a command is added to the command line: the flags all of them take, and a handler imported when it runs."""

import argparse
import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.tables import command_text

if TYPE_CHECKING:
    from pipeline.config import RunConfig

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    Handler = Callable[[RunConfig, argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, and which word was meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rollstream: {message}; see `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"{self.prog} has no command {value!r}, {hint}")
        raise argparse.ArgumentError(action, f"invalid choice {value!r}, {hint}")


class Setting(argparse.Action):
    """A flag that stands for a setting: `dest` is the setting's key and `=`. Remembers how the flag was written."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.options = {**getattr(namespace, "options", {}), self.dest: option}


_EXAMPLE = "example:"


class _Help(argparse.HelpFormatter):
    """Leaves the lines of an example as they are: a command broken anywhere is none."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


def add_command(
    commands: "Commands", name: str, handler: str, summary: str, *, example: str = "", json: bool = False
) -> argparse.ArgumentParser:
    """Add a command whose handler is `module:function`, with the flags every command takes."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"{_EXAMPLE}\n{command_text(example)}" if example else None,
        formatter_class=_Help,
    )
    common = parser.add_argument_group("configuration")
    common.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the run's settings")
    setting = common.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, e.g. grouping.batch_rollouts=64"
    )
    setting.completer = _keys  # type: ignore[attr-defined]  # asked by argcomplete
    common.add_argument(
        "--run", dest="run=", action=Setting, metavar="NAME", help="name of the run, before the topics' names"
    )
    common.add_argument(
        "-b",
        "--bootstrap-servers",
        dest="kafka.bootstrap_servers=",
        action=Setting,
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

    options = [(option, f"{key}{getattr(args, key)}") for key, option in getattr(args, "options", {}).items()]
    path = args.config or getattr(args, "file", None) or getattr(args, "default_config", None)
    return load(path, environment=os.environ, options=options, flags=args.set, client_flags=args.client)


def _keys(**_: object) -> list[str]:
    """What may be set, for completion."""
    from pipeline.config import RunConfig
    from pipeline.settings import known_keys

    return [f"{key.removesuffix('*')}{'' if key.endswith('*') else '='}" for key in known_keys(RunConfig)]
