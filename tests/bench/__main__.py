"""`python -m tests.bench`: measures rows on its own local Kafka, prints tables or JSON, and writes a file.

Tables have 80 columns. The quick form measures some rows with few rollouts, in a few minutes; the full form measures
all rows.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollstream.consumers.freed_memory import MALLOC_SETTINGS, reuse_freed_memory
from rollstream.infra.broker.broker import LocalBroker
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from tests.bench.comparison import compared, comparison_table, read_document
from tests.bench.measure import LatencyRow, Row, Settings, machine
from tests.bench.report import WIDTH, report
from tests.bench.rows import QUICK, ROWS, needs_broker

_ROLLOUTS = {"quick": 1000, "full": 8000}
_REPETITIONS = {"quick": 2, "full": 3}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 1 if a row failed, after printing the other rows, else 0, however slow a row is."""
    args = build_parser().parse_args(arguments)
    form = "full" if args.full or args.only else "quick"
    names = args.only or (list(ROWS) if args.full else list(QUICK))
    earlier = read_document(args.compare) if args.compare else None
    with (
        _allocating_as_roles_do(),
        tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder,
        _broker(Path(folder), names) as servers,
    ):
        settings = Settings(
            kafka=KafkaConfig(bootstrap_servers=servers),
            directory=Path(folder),
            tokens=args.tokens,
            repetitions=args.repetitions or _REPETITIONS[form],
        ).with_rollouts(args.rollouts or _ROLLOUTS[form])
        before = os.getloadavg()[0]
        rows: list[Row | LatencyRow] = []
        failed: dict[str, str] = {}
        for name in names:
            began = time.monotonic()
            print(f"measuring {name}, {settings.repetitions} times", file=sys.stderr, end="", flush=True)
            try:
                rows.append(ROWS[name](settings))
                print(f": {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
    where = machine(before)
    document: dict[str, Any] = {
        "settings": {name: getattr(settings, name) for name in ("rollouts", "tokens", "repetitions")},
        "machine": where,
        "rows": [row.as_dict() for row in rows],
        "failed": failed,
    }
    output = args.output or Path(".rollstream", "bench", f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{form}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    comparison = compared(earlier, document) if earlier else None
    if args.json:
        print(json.dumps(document | ({"comparison": comparison.as_dict()} if comparison else {})))
    else:
        print(report(settings, where, rows, failed))
        if comparison:
            print(f"\n{comparison_table(comparison, str(args.compare), WIDTH)}")
    print(f"written to {output}", file=sys.stderr)
    return 1 if failed else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the benchmark's command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure against raw baselines.")
    parser.add_argument("--full", action="store_true", help="measure all rows, each with more rollouts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(ROWS),
        metavar="NAME",
        help="measure this row only, as in the full form",
    )
    parser.add_argument(
        "--rollouts", type=int, metavar="N", help="rollouts a row (default: 8000, 1000 in the quick form)"
    )
    parser.add_argument("--tokens", type=int, default=2560, metavar="N", help="tokens a rollout (default: %(default)s)")
    parser.add_argument(
        "--repetitions", type=int, metavar="N", help="measurements of each side (default: 3, 2 in the quick form)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON here (default: .rollstream/bench/TIME-FORM.json)"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="show which rows differ from an earlier measurement"
    )
    return parser


@contextmanager
def _allocating_as_roles_do() -> Iterator[None]:
    """Let this process, its baselines and its child processes reuse freed memory while the block runs."""
    settings = {name: str(size_bytes) for name, (_, size_bytes) in MALLOC_SETTINGS.items()}
    added = settings if reuse_freed_memory() else {}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _broker(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the address of a new broker, or "" if no row needs one.

    KAFKA_BOOTSTRAP_SERVERS is never used, because that broker's other load would distort the measurement.
    """
    if not needs_broker(names):
        yield ""
        return
    broker = LocalBroker.start(folder / "broker", bound_to_parent=True)
    try:
        yield broker.bootstrap_servers
    finally:
        broker.stop()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RollstreamError, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, RollstreamError) else 2)
