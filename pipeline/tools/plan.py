"""`rollstream plan`: computes the partitions, processes and brokers that a run needs, and the limit that is met first.

It uses measured rates, and connects to no broker. docs/scaling.md has the formulae.
"""

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollstream.pipeline.capacity import measured_rates
from rollstream.pipeline.capacity.measured_rates import MeasuredRates
from rollstream.pipeline.capacity.plan import CapacityPlan, Machines, Workload, plan
from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.text_tables import bytes_text, table
from rollstream.pipeline.tools.plain_values import compact
from rollstream.topics.errors import ConfigurationError

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SECONDS_A_TOKEN = 0.02
"""Time for a token at 50 tokens per second, the default for an environment's model."""
_SHOWN = 6
"""Number of limits printed."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream plan`."""
    set_handler(
        parser, show_plan, example="rollstream plan --parameters 70B --environments 100k --tokens 4096", json=True
    )
    load = parser.add_argument_group("load")
    _number(load, "--parameters", "parameters of the model, such as 7B or 1T", required=True)
    _number(load, "--environments", "rollouts in progress at a time, such as 10k", required=True)
    _number(load, "--tokens", "mean tokens per rollout, including the prompt", required=True)
    rate = load.add_mutually_exclusive_group()
    _number(rate, "--rollouts-per-s", "rollouts per second (default: each environment makes 50 tokens per second)")
    _number(rate, "--seconds-a-rollout", "instead of the rate: the time that an environment takes for a rollout")
    _number(load, "--retention-hours", "time for which rollouts and batches stay on the brokers", 72)
    _number(load, "--replication", "replicas of each partition", 3)
    _number(load, "--publish-every", "seconds between two policy versions", 60)
    _number(load, "--parameter-bytes", "bytes per published parameter", 2)
    _number(load, "--weight-readers", "inference servers, or caches in front of them, that read each version", 1)
    _number(load, "--batch-readers", "number of readers of the batches", 1)
    load.add_argument(
        "--weights-in-files", action="store_true", help="the bytes of versions go to files, not to the log"
    )
    machines = parser.add_argument_group("machines")
    _number(machines, "--disk-tb", "disk of a broker, terabytes", 4)
    _number(machines, "--disk-mb-per-s", "rate at which a broker writes, megabytes per second", 1000)
    _number(machines, "--network-gbit", "network of a broker in each direction, Gbit/s", 10)
    _number(machines, "--memory-gb", "memory of a grouping process for rollouts in flight, gigabytes", 8)
    _number(machines, "--restore-s", "seconds within which the partitions of a dead process must be read again", 60)
    _number(machines, "--utilisation", "largest share of each capacity to use", 0.7)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help='rates of your own machine, from `make bench ARGS="--full --json"`',
    )


def _number(
    group: "argparse._ArgumentGroup | argparse._MutuallyExclusiveGroup",
    flag: str,
    what: str,
    default: float | None = None,
    *,
    required: bool = False,
) -> None:
    shown = "" if default is None else f" (default: {default:g})"
    group.add_argument(flag, type=number, default=default, required=required, metavar="N", help=what + shown)


def number(text: str) -> float:
    """Parse a finite number that may end with k, M, B, G or T. Raises ValueError for anything else."""
    factor = _SUFFIXES.get(text[-1:].lower(), 1.0)
    value = float(text if factor == 1.0 else text[:-1]) * factor
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def show_plan(config: RunConfig, args: argparse.Namespace) -> int:
    """Print what the load needs."""
    del config
    rates = measured_rates.shipped() if args.measured is None else measured_rates.from_file(args.measured)
    load = workload(args)
    result = plan(load, machines(args), rates)
    print(compact(as_dict(result, load, rates)) if args.json else text_of(result, load, rates))
    return 0


def workload(args: argparse.Namespace) -> Workload:
    """Return the load that the flags describe. Raises ConfigurationError if a value is out of range."""
    rate = args.rollouts_per_s
    if rate is None:
        seconds = args.seconds_a_rollout
        if seconds is not None and seconds <= 0:
            raise ConfigurationError(f"--seconds-a-rollout is {seconds:g}; it must be above 0")
        seconds = _SECONDS_A_TOKEN * args.tokens if seconds is None else seconds
        rate = args.environments / seconds if seconds else 0.0
    return Workload(
        parameters=args.parameters,
        environments=_whole(args.environments),
        tokens=args.tokens,
        rollouts_per_s=rate,
        publish_every_s=args.publish_every,
        parameter_bytes=args.parameter_bytes,
        weights_in_files=args.weights_in_files,
        weight_readers=_whole(args.weight_readers),
        batch_readers=_whole(args.batch_readers),
        retention_s=3600 * args.retention_hours,
        replication=_whole(args.replication),
    )


def _whole(value: float) -> int:
    """Return a whole number as an int; any other number stays as it is, for Workload to refuse under its name."""
    return int(value) if value == int(value) else value  # type: ignore[return-value]


def machines(args: argparse.Namespace) -> Machines:
    """Return the machines that the flags describe. Raises ConfigurationError if a value is out of range."""
    return Machines(
        disk_bytes=args.disk_tb * 1e12,
        disk_bytes_per_s=args.disk_mb_per_s * 1e6,
        network_bytes_per_s=args.network_gbit * 1e9 / 8,
        memory_bytes=args.memory_gb * 1e9,
        restore_s=args.restore_s,
        utilisation=args.utilisation,
    )


def as_dict(result: CapacityPlan, load: Workload, rates: MeasuredRates) -> dict[str, Any]:
    """Convert a plan to plain values for JSON."""
    values = asdict(result)
    values["limits"] = [
        {**limit, "share": each.share} for limit, each in zip(values["limits"], result.limits, strict=True)
    ]
    return {**values, "growth": result.growth, "rollouts_per_s": load.rollouts_per_s, "measured_on": rates.machine}


def text_of(result: CapacityPlan, load: Workload, rates: MeasuredRates) -> str:
    """Return a plan as text for people."""
    rows = [
        ("partitions of rollouts", result.partitions),
        ("grouping processes", result.grouping_processes),
        ("brokers", result.brokers),
        ("processes that send rollouts", result.producers),
        ("learner processes that read batches", result.learner_processes),
        ("processes that publish versions", result.publishers),
    ]
    limits = [
        (limit.resource, limit.name, f"{limit.share:.0%}", f"{1 / limit.share:,.1f} times the load")
        for limit in result.limits[:_SHOWN]
    ]
    return "\n".join(
        (
            f"{load.rollouts_per_s:,.0f} rollouts/s of {_size(load.rollout_bytes)}, "
            f"versions of {_size(load.version_bytes)} every {load.publish_every_s:g} s"
            f"{' in files' if load.weights_in_files else ''}",
            "",
            table(("needed", "number"), rows),
            "",
            f"each broker: {_size(result.broker_disk_bytes)} on disk, {_size(result.broker_in_bytes_per_s)}/s in, "
            f"{_size(result.broker_out_bytes_per_s)}/s out",
            "",
            table(("of", "limit", "used", "met at"), limits),
            "",
            f"limit reached first: {result.first.resource}, {result.first.name}",
            f"rates measured on {rates.machine}",
        )
    )


def _size(amount: float) -> str:
    return bytes_text(round(amount))
