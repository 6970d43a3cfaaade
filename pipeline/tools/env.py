"""`rollstream env`: writes and checks environments; `rollstream role env` plays those of a run."""

import argparse

from rollstream.pipeline.command_line.command_parser import add_command
from rollstream.pipeline.tools import environment_check, environment_template


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream env`."""
    commands = parser.add_subparsers(dest="env_command", metavar="COMMAND", required=True)
    environment_template.register(add_command(commands, "new", "write an environment of your own, with its test"))
    environment_check.register(add_command(commands, "check", "play an environment and show what is trained on"))
