"""Builds the command line: each command's module adds its flags only when the command is chosen."""

import argparse
import difflib
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rollstream.pipeline.command_line.text_tables import command_text

if TYPE_CHECKING:
    from rollstream.pipeline.config import RunConfig

    Commands = argparse._SubParsersAction[Any]
    Handler = Callable[[RunConfig, argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Reports an error on the command line in one line, with the most similar known word.

    The parser of a command whose `module` is set imports that module when it first parses something, and calls
    `register(parser)` there, which adds the flags. `rollstream --help` thus imports no command.
    """

    module = ""
    sections: Mapping[str, Sequence[str]] = {}
    """Names of commands by the title under which --help lists them; without any, argparse's own list."""

    def format_help(self) -> str:
        """Return the help; commands of sections in a list of one line each."""
        if not self.sections:
            return super().format_help()
        [commands] = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        summaries = {choice.dest: choice.help for choice in commands._choices_actions}
        lines = [f"usage: {self.prog} [--version] COMMAND ...", "", self.description or ""]
        for title, names in self.sections.items():
            lines += ["", f"{title}:", *(f"  {name:13} {summaries[name]}" for name in names)]
        return "\n".join([*lines, "", self.epilog or "", ""])

    def load(self) -> None:
        """Import the command's module, unless it is imported already, and let it add its flags."""
        module, self.module = self.module, ""
        if module:
            import_module(module).register(self)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, with the command's flags in place."""
        self.load()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        self.exit(2, f"rollstream: {message}; see `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = [f"{name} {value}" for name, group in _groups(action).items() if value in group]
        near = near or difflib.get_close_matches(str(value), choices, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"{self.prog} has no command {value!r}, {hint}")
        raise argparse.ArgumentError(action, f"invalid choice {value!r}, {hint}")


def _groups(action: argparse.Action) -> dict[str, Collection[str]]:
    """Return the commands below each command, by its name."""
    parsers = action.choices if isinstance(action, argparse._SubParsersAction) else {}
    below = ((name, each) for name, parser in parsers.items() for each in parser._actions)
    return {name: each.choices for name, each in below if isinstance(each, argparse._SubParsersAction)}


class Setting(argparse.Action):
    """A flag that sets a setting: `dest` is the setting's key followed by `=`. Remembers how the flag was written."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.options = {**getattr(namespace, "options", {}), self.dest: option}


_EXAMPLE = "example:"


class _Help(argparse.HelpFormatter):
    """Keeps the line breaks of examples: a command wrapped elsewhere does not run."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


def add_command(commands: "Commands", name: str, summary: str, module: str = "") -> Parser:
    """Add a command. Its flags come from `module` or are added by the caller."""
    parser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", formatter_class=_Help
    )
    assert isinstance(parser, Parser), "argparse makes subparsers of their parent's class"
    parser.module = module
    return parser


class Runs(Setting):
    """The flag --run, which may be given several times: `runs` lists the values, and the last one is the setting."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        super().__call__(parser, namespace, values, option)
        namespace.runs = [*getattr(namespace, "runs", []), values]


def set_handler(
    parser: argparse.ArgumentParser,
    handler: "Handler",
    *,
    example: str = "",
    json: bool = False,
    role: bool = False,
    run_action: type[Setting] = Setting,
    serves: Callable[[argparse.Namespace], bool] = lambda _args: True,
) -> None:
    """Let a command call `handler`, and add the flags that all commands have.

    `role` is true for long-running commands: they log what they do, while tools log only warnings, and have a service
    port. It does not count if `serves` returns false, because the command ends soon with these arguments. `run_action`
    is the action of the flag --run.
    """
    parser.epilog = f"{_EXAMPLE}\n{command_text(example)}" if example else None
    common = parser.add_argument_group("configuration")
    common.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the run's settings")
    setting = common.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, e.g. grouping.batch_rollouts=64"
    )
    setting.completer = _keys  # type: ignore[attr-defined]  # called by argcomplete
    common.add_argument(
        "--run", dest="run=", action=run_action, metavar="NAME", help="name of the run, the prefix of its topics"
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
        "-X", dest="client", action="append", default=[], metavar="KEY=VALUE", help="a setting passed to librdkafka"
    )
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(args: argparse.Namespace) -> int:
        from rollstream.consumers.freed_memory import reuse_freed_memory
        from rollstream.topics import logs

        config = config_of(args)
        is_role = role and serves(args)
        logs.setup("warning" if config.log_level == "info" and not is_role else config.log_level)
        if not is_role:
            return _explaining(config, lambda: handler(config, args))
        reuse_freed_memory()
        if args.command not in _START_BROKERS:
            # A role of `rollstream run` waits for unreachable brokers; without this check, it would also wait for
            # brokers that refuse it.
            check_access(config)
        if not (config.service.port or config.traces.endpoint):
            return handler(config, args)
        # The processes of a role are numbered, unless the role has only one.
        number = getattr(args, "ordinal", getattr(args, "process", None))
        process = args.command if number is None else f"{args.command}-{number}"
        with ExitStack() as stack:
            if config.traces.endpoint:
                from rollstream.topics.traces.spans import start

                stack.callback(start(config.traces, config.run, process))
            if config.service.port:
                from rollstream.pipeline.process.service import ServiceServer

                server = ServiceServer(config.service, run=config.run, role=args.command, process=process)
                stack.enter_context(server)
            return handler(config, args)

    parser.set_defaults(run=run)


_START_BROKERS = ("run", "demo")
"""Commands that may start the broker that they use."""


def check_access(config: "RunConfig") -> None:
    """Raise AccessDenied if the brokers refuse this client's protocol, certificate or credentials."""
    from rollstream.topics.kafka import connection

    connection.check_access(config.kafka)


def _explaining(config: "RunConfig", command: "Callable[[], int]") -> int:
    """Run a command; raise AccessDenied instead of BrokerUnavailable if the brokers refuse this client."""
    from rollstream.topics.errors import AccessDenied, BrokerUnavailable

    try:
        return command()
    except BrokerUnavailable as error:
        if not isinstance(error, AccessDenied):
            check_access(config)
        raise


def config_of(args: argparse.Namespace) -> "RunConfig":
    """Build the configuration from a command's flags, the environment and the configuration file."""
    from rollstream.pipeline.config import load, secret_variables
    from rollstream.topics.secrets import keep_from_programs

    options = [(option, f"{key}{getattr(args, key)}") for key, option in getattr(args, "options", {}).items()]
    path = args.config or getattr(args, "file", None)
    if path is None and (default := getattr(args, "default_config", None)) is not None:
        path = default(args)
    config = load(path, environment=os.environ, options=options, flags=args.set, client_flags=args.client)
    keep_from_programs(secret_variables(config))
    return config


def config_of_run(name: str, args: argparse.Namespace) -> "RunConfig":
    """Build the configuration of another run: with the same flags, and paths of its own."""
    # The last --set overrides every other place that names a run.
    return config_of(argparse.Namespace(**{**vars(args), "set": [*args.set, f"run={name}"]}))


def configuration_flags(args: argparse.Namespace) -> str:
    """Return the flags with which a command was given its configuration, to be appended to the text of another command:
    "" or, for example, ` --config run.toml --run main`."""
    words = ["--config", str(args.config)] if args.config else []
    for key, option in getattr(args, "options", {}).items():
        words += [option, getattr(args, key)]
    for flag, settings in (("--set", args.set), ("-X", args.client)):
        for setting in settings:
            words += [flag, setting]
    return "".join(f" {shlex.quote(word)}" for word in words)


def wait_seconds(text: str) -> float:
    """The value of a flag that sets an interval or a wait, in seconds."""
    with suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and below a million")


def positive_count(text: str) -> int:
    """The value of a flag that sets a number of things, at least 1."""
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")


def _keys(**_: object) -> list[str]:
    """Every key that can be set, for completion."""
    from rollstream.pipeline.config import RunConfig
    from rollstream.pipeline.settings import known_keys

    return [f"{key.removesuffix('*')}{'' if key.endswith('*') else '='}" for key in known_keys(RunConfig)]
