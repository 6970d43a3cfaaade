"""`python -m tests.simulation`: run schedules by seed, and say which fail and with how few faults."""

import argparse
import random
import sys
import time

from tests.simulation.installation import World, installed
from tests.simulation.schedule import run_schedule, shrunk


def main() -> int:
    """Run the schedules that the command line asks for; return 1 if one has findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the first schedule")
    parser.add_argument("--schedules", type=int, default=1000, help="how many, of consecutive seeds")
    given = parser.parse_args()
    print(f"{given.schedules} schedules from seed {given.seed} on")
    world, failed, steps, began = World(), 0, 0, time.process_time()
    with installed(world):
        for seed in range(given.seed, given.seed + given.schedules):
            outcome = run_schedule(world, seed)
            steps += outcome.steps
            if outcome.findings:
                failed += 1
                print(outcome, f"shrunk: {shrunk(world, outcome)}", sep="\n")
    a_minute = given.schedules / (time.process_time() - began) * 60
    print(f"{failed} failed, {steps / given.schedules:.0f} steps each, {a_minute:,.0f} a minute of processor time")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
