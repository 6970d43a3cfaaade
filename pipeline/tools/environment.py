"""`rollstream environment`: pauses environments of a run, resumes them, and changes their weights, while it runs."""

import argparse

from rollstream.pipeline import steering
from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.text_tables import table
from rollstream.pipeline.tools.plain_values import compact
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients

AUTO = "auto"
"""Stands for the configured weight."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream environment`."""
    set_handler(
        parser,
        environment,
        example="rollstream environment pause math --run main --reason 'its verifier hangs'",
        json=True,
    )
    parser.add_argument(
        "action",
        choices=("show", "pause", "resume", "weigh"),
        help="show: what was decided; pause: no worker begins a group of it; resume: they do again; weigh: how often "
        "groups of it begin, next to the others",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"the environment; with weigh NAME=WEIGHT, of which {AUTO} is as configured",
    )
    parser.add_argument("--reason", default="", help="why it is paused; the next operator is told")


def environment(config: RunConfig, args: argparse.Namespace) -> int:
    """Record what is decided, and print what holds."""
    clients.check_broker(config.kafka)
    if args.action != "show" and not args.names:
        raise ConfigurationError(f"name an environment, e.g. `rollstream environment {args.action} math`")
    if args.action == "weigh":
        weights = dict(map(_weight, args.names))
        steering.record(config.kafka, config.run, {"command": "weigh", "weights": weights})
    for name in args.names if args.action in ("pause", "resume") else ():
        reason = {"reason": args.reason} if args.action == "pause" else {}
        command = {"command": f"{args.action}_environment", "environment": name, **reason}
        steering.record(config.kafka, config.run, command)
    held = steering.state(config.kafka, config.run)
    shown = {"paused": held["paused"], "weights": held["weights"]}
    if args.json:
        print(compact(shown))
        return 0
    names = sorted({*shown["paused"], *shown["weights"]})
    rows = [(name, shown["weights"].get(name, ""), shown["paused"].get(name, "")) for name in names]
    print(table(("environment", "weight", "paused because"), rows) if rows else "nothing is paused or weighed anew")
    return 0


def _weight(text: str) -> tuple[str, float | None]:
    name, equals, weight = text.rpartition("=")
    try:
        return (name if equals else text), None if weight == AUTO else float(weight if equals else "")
    except ValueError as error:
        raise ConfigurationError(f"{text!r} names no weight: write NAME=WEIGHT, e.g. math=2, or math={AUTO}") from error
