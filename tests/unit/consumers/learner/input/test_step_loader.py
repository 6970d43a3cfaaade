"""Loading of steps in a process that does not lead: it waits for the lead's plans, but not once it has to end."""

import threading

from rollstream.consumers.learner.input.batch_selection import StepPlan
from rollstream.consumers.learner.input.step_loader import LoadedStep, StepLoader
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.records import BatchUse
from tests.support.waiting import eventually


class SilentLead:
    """The second process of a team whose lead plans no step."""

    process, processes = 1, 2

    def __init__(self) -> None:
        self.waiting, self.over = threading.Event(), threading.Event()

    def publish(self, key: str, value: bytes) -> None:
        raise AssertionError("only the lead publishes plans")

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        self.waiting.set()
        if self.over.wait(timeout_s):
            return b"null"
        raise DeadlineExceeded(key)

    def forget(self, key: str) -> None:
        raise AssertionError("only the lead deletes plans")


class NoSource:
    """A source that is not used, because there is no plan."""

    skips: tuple[int, tuple[BatchUse, ...]] | None = None

    def plan(self, step: int, stop: threading.Event) -> StepPlan | None:
        raise AssertionError("only the lead plans steps")

    def load(self, plan: StepPlan) -> LoadedStep:
        raise AssertionError("there is no plan")

    def close(self) -> None:
        raise AssertionError("the source stays open")


def test_a_process_that_ends_alone_does_not_wait_for_the_next_plan() -> None:
    lead = SilentLead()
    loader = StepLoader(NoSource(), lead, 1, 9, threading.Event())
    closing = threading.Thread(target=loader.close, daemon=True)
    try:
        eventually(lead.waiting.is_set, 60, "the wait for a plan")
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
    finally:
        lead.over.set()


def test_a_process_that_is_told_that_no_step_follows_ends() -> None:
    lead = SilentLead()
    with StepLoader(NoSource(), lead, 1, 9, threading.Event()) as loader:
        assert loader.next(0) is None
        assert not loader.ended
        lead.over.set()
        assert loader.next(60) is None
        assert loader.ended
