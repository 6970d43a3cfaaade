"""`rollstream env`: writes, checks and serves environments; `rollstream role env` plays those of a run."""

import argparse

from rollstream.pipeline.command_line.command_parser import add_command


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream env`."""
    commands = parser.add_subparsers(dest="env_command", metavar="COMMAND", required=True)
    for name, summary, module in (
        ("new", "write an environment of your own, with its test", "environment_template"),
        ("check", "play an environment and show what is trained on", "environment_check"),
        ("serve", "run an environment for workers elsewhere", "environment_serve"),
    ):
        add_command(commands, name, summary, f"rollstream.pipeline.tools.{module}")
