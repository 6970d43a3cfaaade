"""`python -m tests.bench.growth`: measures costs at several sizes, and prints costs and slopes as tables or as JSON.

Exit code 1 if a cost grows faster than it may.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rollstream.infra.broker.broker import LocalBroker
from rollstream.topics.config import KafkaConfig
from tests.bench.growth import grouping_runs, open_groups
from tests.bench.growth.logs import LogGrowth
from tests.bench.growth.series import Series, report
from tests.bench.measure import machine

PARTS = ("open-groups", "partitions", "processes", "logs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts and print their series; return 1 if a cost grows faster than it may."""
    args = build_parser().parse_args(arguments)
    load = os.getloadavg()[0]
    listed: list[Series] = []
    parts: dict[str, Callable[[], list[Series]]] = {
        "open-groups": lambda: open_groups.measure(args.open_groups),
        "partitions": lambda: _on_a_broker(
            lambda kafka, folder: grouping_runs.measure_partitions(kafka, folder, args.partitions)
        ),
        "processes": lambda: _on_a_broker(
            lambda kafka, folder: grouping_runs.measure_processes(kafka, folder, args.processes)
        ),
        "logs": lambda: _on_a_broker(
            lambda kafka, folder: LogGrowth(kafka, folder, args.tokens).measure(args.megabytes, args.archived)
        ),
    }
    for name in args.only or PARTS:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        listed += parts[name]()
    where = machine(load)
    if args.json:
        print(json.dumps({"machine": where, "series": [series.as_dict() for series in listed]}))
    else:
        print(report(listed, [", ".join(f"{name.replace('_', ' ')} {value}" for name, value in where.items())]))
    return 1 if any(series.offends for series in listed) else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the measurement's command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description="Measure how costs grow.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part only")
    for flag, sizes in (
        ("--open-groups", [1_000, 10_000, 100_000, 1_000_000]),
        ("--partitions", [1, 4, 16, 64, 256]),
        ("--processes", [1, 2, 4, 8]),
        ("--megabytes", [100, 300, 1_000, 3_000]),
    ):
        default = " ".join(map(str, sizes))
        parser.add_argument(flag, type=int, nargs="+", default=sizes, metavar="N", help=f"sizes (default: {default})")
    parser.add_argument(
        "--archived", type=int, default=1_000, metavar="MB", help="largest log that is archived (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=2560, help="tokens of a rollout of a log (default: %(default)s)")
    return parser


def _on_a_broker(measure: Callable[[KafkaConfig, Path], list[Series]]) -> list[Series]:
    """Measure on a new broker."""
    with (
        tempfile.TemporaryDirectory(prefix="rollstream-growth-") as folder,
        LocalBroker.start(Path(folder) / "broker", bound_to_parent=True) as broker,
    ):
        return measure(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), Path(folder))


if __name__ == "__main__":
    sys.exit(main())
