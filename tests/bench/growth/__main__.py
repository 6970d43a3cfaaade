"""`python -m tests.bench.growth`: costs over sizes and their slopes, as tables or as JSON.

Exit code 1 if a cost grows faster than it may.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rollstream.infra.broker import LocalBroker
from rollstream.topics.config import KafkaConfig
from tests.bench.growth import open_groups, partitions
from tests.bench.growth.series import Series, report

PARTS = ("open-groups", "partitions")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts and print them."""
    args = build_parser().parse_args(arguments)
    load = os.getloadavg()[0]
    listed: list[Series] = []
    parts: dict[str, Callable[[], list[Series]]] = {
        "open-groups": lambda: open_groups.measure(args.open_groups),
        "partitions": lambda: _on_a_broker(args.partitions),
    }
    for name in args.only or PARTS:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        listed += parts[name]()
    machine = {
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    if args.json:
        print(json.dumps({"machine": machine, "series": [series.as_dict() for series in listed]}))
    else:
        print(report(listed, [", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())]))
    return 1 if any(series.offends for series in listed) else 0


def build_parser() -> argparse.ArgumentParser:
    """The command line of the measurement."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description="Measure how costs grow.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part only")
    for flag, sizes in (
        ("--open-groups", [1_000, 10_000, 100_000]),
        ("--partitions", [1, 4, 16]),
    ):
        default = " ".join(map(str, sizes))
        parser.add_argument(flag, type=int, nargs="+", default=sizes, metavar="N", help=f"sizes (default: {default})")
    return parser


def _on_a_broker(sizes: Sequence[int]) -> list[Series]:
    """Measure partitions on a broker of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="rollstream-growth-") as folder,
        LocalBroker.start(Path(folder) / "broker", bound_to_parent=True) as broker,
    ):
        return partitions.measure(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), Path(folder), sizes)


if __name__ == "__main__":
    sys.exit(main())
