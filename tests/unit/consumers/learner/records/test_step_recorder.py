"""Steps of a run's earlier learners, counted in the steps of the learner that replaced them."""

from collections.abc import Mapping

import pytest

from rollstream.consumers.learner.records.step_recorder import earlier_steps
from rollstream.topics.records import PolicyManifest


def manifests(*published: tuple[str, int], again: Mapping[int, int] | None = None) -> list[PolicyManifest]:
    """The versions of a run, in order, each of a learner after a step; `again` has the version of which a version
    repeats the parameters."""
    return [
        PolicyManifest(
            version=version,
            learner=learner,
            step=step,
            epoch="e",
            tensors=(),
            chunks=(),
            digest="",
            params_digest=str((again or {}).get(version, version)),
        )
        for version, (learner, step) in enumerate(published)
    ]


def test_the_last_step_of_a_learner_that_was_replaced_is_the_first_of_its_successor() -> None:
    replaced = manifests(("a", 0), ("a", 50), ("a", 100))
    assert earlier_steps(replaced, "b", 0) == {0: -100, 1: -50, 2: 0}
    assert earlier_steps(replaced, "b", 40) == {0: -60, 1: -10, 2: 40}
    assert earlier_steps(replaced, "a", 0) == {}


def test_versions_that_the_successor_publishes_change_nothing() -> None:
    replaced, own = (("a", 0), ("a", 100)), [("b", step) for step in range(5)]
    expected = earlier_steps(manifests(*replaced), "b", 0)
    for count in range(6):
        assert earlier_steps(reversed(manifests(*replaced, *own[:count])), "b", 0) == expected


@pytest.mark.parametrize("last", [30, 300])
def test_a_learner_that_takes_over_again_counts_versions_since_then_from_its_own_last(last: int) -> None:
    published = manifests(("a", 0), ("a", 100), ("b", last - 1), ("b", last), ("a", 101))
    assert earlier_steps(published, "a", 0) == {2: 99, 3: 100}
    assert earlier_steps(published, "b", 0) == {0: -100, 1: 0, 4: last}


def test_a_version_that_was_rolled_back_to_stays_as_old_as_its_parameters() -> None:
    before = (("a", 40), ("a", 100))
    assert earlier_steps(manifests(*before, ("a", 40), again={2: 0}), "b", 0) == {0: -60, 1: 0, 2: -60}
    later = manifests(*before, ("b", 0), ("b", 50), ("a", 40), ("b", 51), again={4: 0})
    assert earlier_steps(later, "b", 0) == {0: -60, 1: 0, 4: -60}
    assert earlier_steps(later, "a", 0) == {2: 49, 3: 99, 5: 100}


def test_a_step_that_was_made_again_with_other_bits_is_the_last_of_its_learner() -> None:
    assert earlier_steps(manifests(("a", 80), ("a", 100), ("a", 81)), "b", 0) == {0: -1, 1: 0, 2: 0}
