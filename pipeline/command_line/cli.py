"""The command `rollstream`: parses arguments, loads the configuration, calls one handler, turns errors into one line.

Each command is a module that adds its flags and holds its handler, imported when the command is chosen, so that --help
answers at once. Exit codes: 0 success, 1 a negative result (or a failed run), 2 an error with a remedy in its message,
3 fenced, 4 a ledger that cannot be decided yet, 130 interrupted, 143 ended by SIGTERM before the work was done.
"""

import argparse
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rollstream.pipeline.command_line.command_parser import Parser, add_command
from rollstream.pipeline.command_line.commands import COMMANDS, GROUPS, SECTIONS
from rollstream.pipeline.command_line.text_tables import printable
from rollstream.pipeline.process import interruption
from rollstream.pipeline.process.role_process import watch_lifeline
from rollstream.topics.errors import RollstreamError

_BROKEN_PIPE = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    watch_lifeline()
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        import argcomplete

        argcomplete.autocomplete(build_parser(load=os.environ["COMP_LINE"].split()))
    debug = False
    try:
        args = build_parser().parse_args(arguments)
        debug = args.debug
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except RollstreamError as error:
        if debug or interruption.received():
            raise
        # The message may contain names from records, which anybody can write.
        print(printable(f"rollstream: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return 128 + int(getattr(interrupt, "signal_number", signal.SIGINT))
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from reporting that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        # A file that a command reads or writes; `str` names it.
        if debug or error.filename is None:
            raise
        print(printable(f"rollstream: {error}; check the path and its permissions, or free space"), file=sys.stderr)
        return 2


def build_parser(load: Collection[str] = ()) -> Parser:
    """Return the parser of the whole command line; only the commands named in `load` have their flags yet.

    A command sets `run`, a function from the parsed arguments to the exit code.
    """
    parser = Parser(
        prog="rollstream",
        description="Reinforcement learning of language models over a log: every rollout in exactly one place.",
        epilog="Start with `rollstream demo`. Every command answers --help.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "--help-settings",
        action=_Reference,
        nargs="?",
        const="",
        metavar="KEY",
        help="show every setting, or those below a key such as grouping, with its default and meaning",
    )
    parser.add_argument(
        "--help-metrics",
        action=_Reference,
        nargs="?",
        const="",
        metavar="ROLE",
        help="show every metric at /metrics, or those of a role such as group",
    )
    parser.sections = {title: tuple(section) for title, section in SECTIONS.items()}
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = add_command(commands, name, summary, module and f"rollstream.pipeline.{module}")
        loaded = [command]
        if name in GROUPS:
            below = command.add_subparsers(dest="command", metavar="COMMAND", required=True)
            loaded = [add_command(below, *entry) for entry in _entries(GROUPS[name])]
        for each in loaded if name in load else ():
            each.load()
    return parser


def _entries(group: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    for name, (module, summary) in group.items():
        yield name, summary, f"rollstream.pipeline.{module}"


class _Version(argparse.Action):
    """Prints the version, which is looked up only when requested, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rollstream {version('rollstream')}")
        parser.exit()


class _Reference(argparse.Action):
    """Prints a list of the settings or metrics, which are imported only when requested, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, values: Any, _option: object = None
    ) -> None:
        from rollstream.pipeline.command_line.reference import metrics_text, settings_text

        print({"help_settings": settings_text, "help_metrics": metrics_text}[self.dest](values))
        parser.exit()
