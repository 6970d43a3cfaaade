"""`rollstream steer environment`: pauses, resumes and weighs the environments of a running run."""

import argparse
from collections.abc import Mapping
from typing import Any

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.control import steering
from rollstream.producers.flow.mixture_states import environments_played
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients

AUTO = "auto"
"""Value that stands for the configured weight."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream steer environment`."""
    set_handler(
        parser,
        environment,
        example="rollstream steer environment pause math --run main --reason 'its verifier hangs'",
        json=True,
    )
    parser.add_argument(
        "action",
        choices=("show", "pause", "resume", "weigh"),
        help="show: print the environments, with their weights and pauses; pause: workers begin no more groups of the "
        "environment; resume: they begin groups of it again; weigh: set how often groups of it begin, relative to the "
        "other environments",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"the environment; with weigh: NAME=WEIGHT, or NAME={AUTO} for the configured weight",
    )
    parser.add_argument("--reason", default="", help="why it is paused, required by pause; shown to the next operator")


def environment(config: RunConfig, args: argparse.Namespace) -> int:
    """Record the decision, and print the environments with the decisions in force."""
    clients.check_broker(config.kafka)
    steering.check_run(config.kafka, config.run)
    if args.action != "show" and not args.names:
        raise ConfigurationError(f"name an environment, e.g. `rollstream steer environment {args.action} math`")
    if args.action == "weigh":
        weights = dict(map(_weight, args.names))
        steering.record(config.kafka, config.run, {"command": "weigh", "weights": weights})
    for name in args.names if args.action in ("pause", "resume") else ():
        reason = {"reason": args.reason} if args.action == "pause" else {}
        command = {"command": f"{args.action}_environment", "environment": name, **reason}
        steering.record(config.kafka, config.run, command)
    held = steering.state(config.kafka, config.run)
    environments = _environments(config, held["paused"], held["weights"])
    if args.json:
        print(compact({"paused": held["paused"], "weights": held["weights"], "environments": environments}))
        return 0
    rows = [
        (name, "as configured" if each["weight"] is None else f"{each['weight']:g}", each["paused"] or "")
        for name, each in environments.items()
    ]
    print(table(("environment", "weight", "paused because"), rows))
    if not held["paused"] and not held["weights"]:
        print("no environment is paused, and all have their configured weights")
    return 0


def _environments(
    config: RunConfig, paused: Mapping[str, str], weights: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Return the weight in force and the reason of a pause, by environment; None for a weight that is not known here.

    The workers of the run record the names; before the first of them starts, the configuration has them.
    """
    configured = {entry.name or entry.use: entry.weight for entry in config.mixture}
    played = environments_played(config.kafka, config.run) or configured.keys()
    in_force = {**configured, **weights}
    return {
        name: {"weight": in_force.get(name), "paused": paused.get(name)}
        for name in sorted({*played, *paused, *weights})
    }


def _weight(text: str) -> tuple[str, float | None]:
    name, equals, weight = text.rpartition("=")
    try:
        return (name if equals else text), None if weight == AUTO else float(weight if equals else "")
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} does not name a weight: write NAME=WEIGHT, e.g. math=2, or math={AUTO}"
        ) from error
