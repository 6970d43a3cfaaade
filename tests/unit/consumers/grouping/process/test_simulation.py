"""Grouping processes over a model of Kafka under many schedules of faults; a seed draws and repeats each schedule.

`python -m tests.simulation --seed N --schedules 1` repeats a schedule that failed.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.installation import World
from tests.simulation.mutants import BROKEN_BROKERS, MUTANTS, Patch
from tests.simulation.schedule import Fault, Outcome, as_it_is, drawn_faults, long_stops, run_schedule, shrunk
from tests.support.paths import ROOT

QUICKLY_FOUND = ("writes_the_index_after_the_commit",)
"""Another one, which restores what is undecided, is found where its schedule shrinks."""
SHOWN_BY_LONG_STOPS = ("keeps_revoked_tasks",)
"""Mutants that one schedule in a hundred of long stops shows, and one in ten thousand of any faults."""
WITHIN = 5000
"""Schedules in which each mutant must be found."""


def failures(world: World, schedules: int) -> list[Outcome]:
    """Run schedules, always the same ones on CI, and return those with findings, shrunk."""
    first = 0 if os.environ.get("CI") else random.randrange(2**32)
    print(f"{schedules} schedules from seed {first} on")
    outcomes = (run_schedule(world, seed) for seed in range(first, first + schedules))
    return [shrunk(world, outcome) for outcome in outcomes if outcome.findings]


def test_no_schedule_of_faults_loses_or_repeats_anything(world: World) -> None:
    assert failures(world, 80) == []


def test_no_schedule_of_long_stops_loses_or_repeats_anything(world: World) -> None:
    # Seeds 62 and 78 show a process that keeps a task that another one had meanwhile.
    assert [seed for seed in range(55, 80) if run_schedule(world, seed, long_stops(seed)).findings] == []


@pytest.mark.long
def test_no_schedule_of_very_many_loses_or_repeats_anything(world: World) -> None:
    assert failures(world, 8_000) == []


def first_found(
    world: World,
    tamper: Callable[[Cluster], None] = as_it_is,
    faults: Callable[[int], tuple[Fault, ...]] = drawn_faults,
) -> int | None:
    """The first seed whose schedule has findings."""
    return next((seed for seed in range(WITHIN) if run_schedule(world, seed, faults(seed), tamper).findings), None)


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=() if m.__name__ in QUICKLY_FOUND else pytest.mark.long, id=m.__name__) for m in MUTANTS],
)
def test_the_judge_finds_a_mutant(world: World, mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        named = mutant.__name__ in SHOWN_BY_LONG_STOPS
        violation = first_found(world, faults=long_stops if named else drawn_faults)
    print(f"{mutant.__name__}: found by schedule {violation}")
    assert violation is not None


@pytest.mark.long
@pytest.mark.parametrize("broken", BROKEN_BROKERS, ids=lambda broken: broken.__name__)
def test_the_judge_finds_a_broken_broker(world: World, broken: Callable[[Cluster], None]) -> None:
    violation = first_found(world, broken)
    print(f"{broken.__name__}: found by schedule {violation}")
    assert violation is not None


def test_a_seed_repeats_its_schedule_in_another_process(world: World) -> None:
    seed = next(seed for seed in range(100) if len(drawn_faults(seed)) == 3)
    here = [run_schedule(world, seed) for _ in range(2)]
    program = (
        "from tests.simulation.installation import World, installed\n"
        "from tests.simulation.schedule import run_schedule\n"
        "world = World()\n"
        "with installed(world):\n"
        f"    outcome = run_schedule(world, {seed})\n"
        "print(outcome.steps, outcome.fingerprint)\n"
    )
    there = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {f"{outcome.steps} {outcome.fingerprint}" for outcome in here} == {there.stdout.strip()}


def test_a_failing_schedule_shrinks_to_the_faults_it_needs(world: World, monkeypatch: Patch) -> None:
    from tests.simulation.mutants import restores_what_is_undecided

    restores_what_is_undecided(monkeypatch)
    outcomes = (run_schedule(world, seed) for seed in range(WITHIN) if len(drawn_faults(seed)) > 1)
    failing = next(outcome for outcome in outcomes if outcome.findings)
    smaller = shrunk(world, failing)
    assert smaller.findings
    assert len(smaller.faults) <= len(failing.faults)
    assert set(smaller.faults) <= set(failing.faults)
