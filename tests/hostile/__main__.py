"""`python -m tests.hostile`: give hostile input to each target by seed, and say what became of all of it."""

import argparse
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hostile.flood_targets import Outcome, flood, peak_mib
from tests.hostile.targets import TARGETS

SHARES = sum(target.share for target in TARGETS.values())


def main() -> int:
    """Run the targets that the command line asks for; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="number of inputs to all targets together")
    parser.add_argument("--seed", type=int, default=1, help="of the first piece of each target")
    parser.add_argument("--only", action="append", choices=TARGETS, help="a target; may be repeated")
    given = parser.parse_args()
    logging.disable()  # Readers tell of what they pass over.
    outcomes: list[Outcome] = []
    with TemporaryDirectory(prefix="hostile-") as folder:
        for name in given.only or TARGETS:
            target = TARGETS[name]
            outcomes.append(flood(target, given.inputs * target.share // SHARES, given.seed, Path(folder)))
            print(outcomes[-1], flush=True)
    inputs, failed = sum(outcome.fates.total() for outcome in outcomes), [o for o in outcomes if o.failure]
    print(f"{inputs:,} inputs, {len(failed)} of {len(outcomes)} targets failed, peak {peak_mib():.0f} MiB")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
