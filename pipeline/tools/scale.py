"""`rollstream steer scale`: records how many processes of each role a run should have, or shows the numbers."""

import argparse

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.control import steering
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients

AUTO = "auto"
"""Restores the number in the settings."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream steer scale`."""
    set_handler(parser, scale, example="rollstream steer scale env=8 group=3 infer=2 --run main", json=True)
    parser.add_argument(
        "numbers",
        nargs="*",
        metavar="ROLE=N",
        help=f"the number of processes that a role should have; {AUTO} restores the number in the settings",
    )


def scale(config: RunConfig, args: argparse.Namespace) -> int:
    """Record the numbers, and print the numbers in force."""
    clients.check_broker(config.kafka)
    steering.check_run(config.kafka, config.run)
    numbers = dict(_number(text) for text in args.numbers)
    if numbers:
        steering.record(config.kafka, config.run, {"command": "scale", "processes": numbers})
    wanted = steering.state(config.kafka, config.run)["processes"]
    if args.json:
        print(compact(wanted))
        return 0
    if wanted:
        print(table(("role", "processes"), sorted(wanted.items())))
    others = ", ".join(role for role in steering.SCALED if role not in wanted)
    if others:
        print(f"as the settings say: {others}")
    print(f"`rollstream run --run {config.run}` follows these numbers, now and when it is started again")
    return 0


def _number(text: str) -> tuple[str, int | None]:
    role, equals, number = text.partition("=")
    if not equals or not role:
        raise ConfigurationError(f"{text!r} does not name a number: write ROLE=N, e.g. env=8")
    if number == AUTO:
        return role, None
    if not number.isdecimal() or len(number) > 9:
        raise ConfigurationError(f"{text!r}: {number!r} is not a number of processes; write {role}=2, or {role}={AUTO}")
    return role, int(number)
