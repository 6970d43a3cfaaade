"""Fault injection of the demo: the seed decides which roles die and when; the run shows when each is back."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.launch.demo_faults import Fault, FaultInjector, FaultPlan, faults_text, plan_faults
from rollstream.pipeline.run import plan as plans
from tests.support.paths import ROOT

DEMO = load(ROOT / "recipes" / "dsort3" / "run.toml")


@dataclass
class World:
    """Roles, and a clock, that do what a test says."""

    ready: set[str] = field(default_factory=lambda: {"group-1", "learn"})
    over: bool = False
    now: float = 100.0
    lines: list[str] = field(default_factory=list)

    def kill(self, name: str) -> int | None:
        self.ready.remove(name)
        return 7

    def is_ready(self, name: str) -> bool:
        return name in self.ready

    def finished(self, name: str) -> bool:
        return self.over

    def injector(self, step: int = 5) -> FaultInjector:
        return FaultInjector(
            FaultPlan(step=step, roles=("group-1", "learn")), self, self.lines.append, lambda: self.now
        )


def planned(config: RunConfig) -> FaultPlan | None:
    return plan_faults(config, plans.plan(config, Path("run.toml")))


def test_the_moment_and_the_victims_follow_from_the_seed() -> None:
    actual = [planned(replace(DEMO, seed=seed)) for seed in range(20)]
    assert actual == [planned(replace(DEMO, seed=seed)) for seed in range(20)]
    assert all(plan is not None and 40 <= plan.step <= 80 and plan.roles[1] == "learn" for plan in actual)
    assert {plan.roles[0] for plan in actual if plan is not None} == {"group-0", "group-1"}
    assert len({plan.step for plan in actual if plan is not None}) > 10


def test_nothing_is_killed_where_nobody_would_start_it_again() -> None:
    assert planned(replace(DEMO, supervisor=replace(DEMO.supervisor, restarts=0))) is None


def test_both_are_killed_at_once_and_each_comes_back_in_its_time() -> None:
    world = World()
    injector = world.injector()
    injector.poll(4)
    assert (injector.faults, injector.pending) == ((), False)
    world.now = 103.0
    injector.poll(6)
    assert [(fault.role, fault.step, fault.at_s) for fault in injector.faults] == [
        ("group-1", 6, 3.0),
        ("learn", 6, 3.0),
    ]
    assert injector.pending
    world.now, world.ready = 105.0, {"group-1"}
    injector.poll(7)  # a step of the killed learner, read late
    world.now, world.ready = 109.0, {"group-1", "learn"}
    injector.poll(7)
    assert injector.pending
    world.now = 110.0
    injector.poll(8)
    assert not injector.pending
    assert [(fault.back_s, fault.back) for fault in injector.faults] == [(2.0, "its partitions"), (7.0, "step 8")]
    injector.poll(9)
    assert len(injector.faults) == 2
    assert world.lines == [
        "kill -9 of group-1 (process 7) and learn (process 7) at step 6",
        "group-1 is back after 2.0 s, with its partitions",
        "learn is back after 7.0 s, with step 8",
    ]


def test_a_learner_that_had_made_its_last_step_is_back_when_it_has_made_it_again() -> None:
    world = World()
    injector = world.injector()
    injector.poll(5)
    world.over, world.ready = True, {"group-1", "learn"}
    injector.poll(5)
    assert [fault.back for fault in injector.faults] == ["its partitions", "its last step"]


def test_nothing_is_killed_once_the_learner_has_finished() -> None:
    world = World(over=True)
    injector = world.injector()
    injector.poll(9)
    assert injector.faults == ()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(role="learn", pid=7, step=84, at_s=31.2, back_s=9.31, back="step 85"), "step 84, 31 s  9.3 s, step 85"),
        (Fault(role="learn", pid=7, step=84, at_s=31.2), "step 84, 31 s  never"),
    ],
)
def test_the_text_says_what_was_killed_when_and_when_it_was_back(fault: Fault, says: str) -> None:
    assert says in faults_text((fault,))
    assert faults_text(()) == "nothing was killed on the way"
