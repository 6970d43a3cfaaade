"""`python -m tests.hostile`: gives hostile input to each target, by seed, and reports the outcome of each input."""

import argparse
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hostile.flood_targets import Outcome, pieces
from tests.hostile.targets import TARGETS, flood_by_name

SHARES = sum(target.share for target in TARGETS.values())


def main() -> int:
    """Run the targets that the command line asks for; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="number of inputs to all targets together")
    parser.add_argument("--seed", type=int, default=1, help="of the first piece of each target")
    parser.add_argument("--only", action="append", choices=TARGETS, help="a target; may be repeated")
    parser.add_argument("--processes", type=int, default=1, help="number of pieces at a time (default: 1)")
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    with TemporaryDirectory(prefix="hostile-") as folder:
        for outcome in flooded(given.only or list(TARGETS), given.inputs, given.seed, given.processes, Path(folder)):
            outcomes.append(outcome)
            print(outcome, flush=True)
    inputs, failed = sum(outcome.fates.total() for outcome in outcomes), [o for o in outcomes if o.failure]
    peak_mib = max(outcome.peak_mib for outcome in outcomes)
    print(f"{inputs:,} inputs, {len(failed)} of {len(outcomes)} targets failed, peak {peak_mib:.0f} MiB of a process")
    return int(bool(failed))


def flooded(names: Sequence[str], inputs: int, seed: int, processes: int, folder: Path) -> Iterator[Outcome]:
    """Give each target its share of so many inputs, in pieces of one seed each, so many pieces at a time."""
    context = multiprocessing.get_context("spawn")
    # Readers would log all that they pass over, so logging is off in the processes.
    with ProcessPoolExecutor(processes, context, logging.disable) as pool:
        parts = [
            [
                pool.submit(flood_by_name, name, count, piece_seed, folder)
                for piece_seed, count in pieces(TARGETS[name], inputs * TARGETS[name].share // SHARES, seed)
            ]
            for name in names
        ]
        for futures in parts:
            yield Outcome.together(future.result() for future in futures)


if __name__ == "__main__":
    sys.exit(main())
