"""`python -m tests.bench`: every row on a local Kafka of its own, as a table of 80 columns or as JSON."""

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollstream.infra.broker import LocalBroker
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from tests.bench import (
    archive_row,
    books_row,
    buffer_row,
    codec_row,
    decode_row,
    fold_row,
    gateway_row,
    group_row,
    latency_row,
    learner_rows,
    produce_row,
    restore_row,
    slice_row,
    stall_row,
    step_rows,
    swap_row,
    trajectory_row,
    weights_row,
    worker_row,
)
from tests.bench.measure import LatencyRow, Row, Settings
from tests.support.vllm_server import is_installed

ROWS: dict[str, Callable[[Settings], Row | LatencyRow]] = {
    "codec": codec_row.measure,
    "produce": produce_row.measure,
    "worker": worker_row.measure,
    "fold-1k": fold_row.row("fold-1k", 1_000),
    "fold-10k": fold_row.row("fold-10k", 10_000),
    "fold-100k": fold_row.row("fold-100k", 100_000),
    "group-and-batch": group_row.measure,
    "latency-100": latency_row.row("latency-100", 100),
    "latency-1000": latency_row.row("latency-1000", 1_000),
    "gateway": gateway_row.measure,
    "restore": restore_row.measure,
    "books": books_row.measure,
    "archive": archive_row.measure,
    "buffer": buffer_row.measure,
    "slices": slice_row.row("slices", images=False),
    "slices-images": slice_row.row("slices-images", images=True),
    "trajectories": trajectory_row.row("trajectories", images=False),
    "trajectories-img": trajectory_row.row("trajectories-img", images=True),
    "decode-equal": decode_row.equal,
    "decode-mixed": decode_row.mixed,
    "decode-arrivals": decode_row.arrivals,
    "weights": weights_row.measure,
    "weights-128": weights_row.row("weights-128", 128),
    "weights-1024": weights_row.row("weights-1024", 1024),
    "weights-2048": weights_row.row("weights-2048", 2048),
    "swap": swap_row.row("swap", "infer"),
    **({"swap-vllm": swap_row.row("swap-vllm", "vllm-plugin")} if is_installed() else {}),
    "stall-256": stall_row.row("stall-256", 256),
    "stall-1024": stall_row.row("stall-1024", 1024),
    "feed": learner_rows.measure_feed,
    "learn": learner_rows.measure_learn,
    "step": step_rows.measure_step,
    "share-64": step_rows.measure_share,
}
_FILES = {"slices", "slices-images", "trajectories", "trajectories-img"}
_DECODING = {"decode-equal", "decode-mixed", "decode-arrivals"}
_NO_BROKER = {"codec", "buffer", "step", "share-64", *_FILES, *_DECODING, "fold-1k", "fold-10k", "fold-100k"}
_WIDTH = 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit code 0 however slow it was, 1 where a row failed: the others are printed."""
    args = build_parser().parse_args(arguments)
    names = args.only or list(ROWS)
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder, _broker(Path(folder), names) as servers:
        settings = Settings(
            kafka=KafkaConfig(bootstrap_servers=servers),
            directory=Path(folder),
            rollouts=args.rollouts,
            tokens=args.tokens,
            repetitions=args.repetitions,
        )
        settings = dataclasses.replace(settings, poll_records=min(settings.poll_records, max(1, args.rollouts // 8)))
        before = os.getloadavg()[0]
        rows, failed = [], {}
        for name in names:
            print(f"measuring {name}, {args.repetitions} times", file=sys.stderr, flush=True)
            try:
                rows.append(ROWS[name](settings))
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
    machine = _machine(before)
    if args.json:
        print(json.dumps({"machine": machine, "rows": [row.as_dict() for row in rows], "failed": failed}))
    else:
        print(report(settings, machine, rows, failed))
    return 1 if failed else 0


def build_parser() -> argparse.ArgumentParser:
    """The command line of the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure against raw baselines.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=tuple(ROWS), metavar="NAME", help="measure this row only")
    parser.add_argument("--rollouts", type=int, default=8000, metavar="N", help="rollouts a row (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2560, metavar="N", help="tokens a rollout (default: %(default)s)")
    parser.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="measurements of each side (default: %(default)s)"
    )
    return parser


@contextmanager
def _broker(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Address of a broker where a row needs one. Never KAFKA_BOOTSTRAP_SERVERS: it would measure others' load too."""
    if set(names) <= _NO_BROKER:
        yield ""
        return
    broker = LocalBroker.start(folder / "broker", bound_to_parent=True)
    try:
        yield broker.bootstrap_servers
    finally:
        broker.stop()


def _machine(load_before: float) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def report(
    settings: Settings,
    machine: dict[str, Any],
    rows: Sequence[Row | LatencyRow],
    failed: Mapping[str, str] | None = None,
) -> str:
    """Plain tables no wider than 80 columns, what the columns mean, and why rows are missing."""
    lines = [
        f"{settings.rollouts:,} rollouts of {settings.tokens:,} tokens, {settings.repetitions} repetitions, medians",
        f"{machine['cores']} cores shared with the broker; load {machine['load_before']} before, "
        f"{machine['load_after']} after",
    ]
    rates = [row for row in rows if isinstance(row, Row)]
    latencies = [row for row in rows if isinstance(row, LatencyRow)]
    if rates:
        lines += [
            "",
            "                    rollouts/s              ratio                CPU us/rollout",
            "row                 ours     raw  noise  median  lowest..highest  ours     raw",
        ]
    for row in rates:
        values = row.as_dict()
        lines.append(
            f"{row.name:16}{values['rollouts_per_s']:>8,.0f}{values['baseline_rollouts_per_s']:>8,.0f}"
            f"{row.noise:>7.0%}{row.ratio:>8.2f}{min(row.ratios):>8.2f}..{max(row.ratios):<7.2f}"
            f"{values['cpu_us_per_rollout']:>6,.0f}{values['baseline_cpu_us_per_rollout']:>8,.0f}"
        )
    if latencies:
        lines += [
            "",
            "                    ours, ms        raw, ms         ratio of p99",
            "row                 p50     p99     p50     p99     median  lowest..highest",
        ]
    for late in latencies:
        values = late.as_dict()
        lines.append(
            f"{late.name:16}{values['p50_ms']:>7,.1f}{values['p99_ms']:>8,.1f}{values['baseline_p50_ms']:>8,.1f}"
            f"{values['baseline_p99_ms']:>8,.1f}{late.ratio:>11.2f}{min(late.ratios):>8.2f}..{max(late.ratios):<7.2f}"
        )
    lines.append("")
    for each in rows:
        lines += textwrap.wrap(f"{each.name}: {each.what}; raw: {each.baseline}", _WIDTH, subsequent_indent="  ")
        if each.figures:
            seen = "; ".join(f"{name} {value:,.3g}" for name, value in each.figures.items())
            lines += textwrap.wrap(f"  seen: {seen}", _WIDTH, subsequent_indent="  ")
    lines.append("ratio: ours over raw in the same repetition; noise: how far raw alone varied.")
    for name, error in (failed or {}).items():
        lines += ["", *textwrap.wrap(f"{name} FAILED: {error}", _WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RollstreamError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
