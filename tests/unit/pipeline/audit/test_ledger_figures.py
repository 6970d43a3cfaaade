"""The ledger's figures of evaluations do not depend on the order of reading; a ledger counts its own run's letters."""

import itertools

import pytest

from rollstream.pipeline.audit.ledger.dead_letters import of_rollouts
from rollstream.pipeline.audit.ledger.evaluations import evaluation
from tests.support.runs import rollout


def test_an_evaluation_does_not_depend_on_the_order_of_reading() -> None:
    rewards = (0.1, 0.2, 0.3, 0.7)
    read = [rollout("x", n, reward=r, reward_components={"exact": r}) for n, r in enumerate(rewards)]
    assert len({sum(order) for order in itertools.permutations(rewards)}) > 1
    actual = [evaluation("env", "heldout", "last", 3, order) for order in itertools.permutations(read)]
    assert all(observed == actual[0] for observed in actual)
    assert actual[0]["reward"] == actual[0]["exact"] == pytest.approx(0.325)


@pytest.mark.parametrize(
    ("topic", "counted"),
    [
        (b"main.rollouts", True),
        (b"a.run.with.dots.rollouts", True),
        (b"main.unlabelled", False),
        (b"\xff.unlabelled", False),
        (None, True),
    ],
)
def test_letters_of_rollouts_are_counted_those_of_trajectories_are_not(topic: bytes | None, counted: bool) -> None:
    """A restored run has letters that name the run they were written in; letters of early releases name no topic."""
    assert of_rollouts({"__streams.errors.topic": topic}) is counted
    assert of_rollouts({}) is True
