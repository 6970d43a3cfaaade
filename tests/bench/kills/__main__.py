"""`make kills`: kills processes of rollstream and of other loops at seeded moments, and counts what was lost."""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from rollstream.infra.broker.broker import LocalBroker
from rollstream.pipeline.command_line.text_tables import table
from tests.bench.kills import peers, rollstream_run
from tests.bench.kills.tally import Tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit code 1 if rollstream lost a rollout or doubled one."""
    args = build_parser().parse_args(arguments)
    seed = random.randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}, {args.kills} kills of each", file=sys.stderr, flush=True)
    tallies = []
    with tempfile.TemporaryDirectory(prefix="rollstream-kills-") as folder:
        for name in args.only or (rollstream_run.NAME, *peers.LOOPS):
            print(f"killing {name}", file=sys.stderr, flush=True)
            with redirect_stdout(sys.stderr):  # keeps what a run prints out of stdout
                tallies.append(_tally(name, Path(folder) / name, args.kills, seed))
    if args.json:
        print(json.dumps({"seed": seed, "tallies": [dataclasses.asdict(tally) for tally in tallies]}))
    else:
        print(f"seed {seed}\n\n{report(tallies)}")
    return 1 if any(tally.loop == rollstream_run.NAME and (tally.lost or tally.doubled) for tally in tallies) else 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kills", description="Count what kill -9 costs.")
    names = (rollstream_run.NAME, *peers.LOOPS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="measure only this loop")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="kills of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the moments and processes (default: random)")
    return parser


def _tally(name: str, directory: Path, kills: int, seed: int) -> Tally:
    if name in peers.LOOPS:
        return peers.tally_of(peers.LOOPS[name], directory, kills, seed)
    # Never use KAFKA_BOOTSTRAP_SERVERS: this broker has no other load.
    broker = LocalBroker.start(directory.parent / "broker", bound_to_parent=True)
    try:
        return rollstream_run.tally_of(broker.bootstrap_servers, "kills", directory, kills, seed)
    finally:
        broker.stop()


def report(tallies: Sequence[Tally]) -> str:
    """The tallies as a table."""
    columns = ("loop", "kills", "produced", "trained on", "dropped, on record", "doubled", "lost")
    rows = [(t.loop, sum(t.kills.values()), t.produced, t.trained, t.on_record, t.doubled, t.lost) for t in tallies]
    killed = [f"{t.loop}: killed {', '.join(f'{name} {n}' for name, n in t.kills.items())}" for t in tallies]
    return "\n".join((table(columns, rows), "", *killed))


if __name__ == "__main__":
    sys.exit(main())
