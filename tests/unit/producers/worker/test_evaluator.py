"""The evaluator finds the policy version that is due, and those evaluated before."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.config import EvaluationConfig
from rollstream.producers.worker.evaluator import SettledVersions, due_version, evaluated_versions
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import EvaluationRequest, Rollout
from tests.support.runs import rollout


@pytest.mark.parametrize(
    ("published", "settled", "actual"),
    [
        ((), (), (None, [])),
        ((0,), (), (0, [])),
        ((0, 1, 2), (0,), (None, [])),
        ((0, 1, 2, 3), (0,), (3, [])),
        (range(8), (0,), (6, [3])),
        (range(10), (), (9, [0, 3, 6])),
        (range(8), (6,), (None, [0, 3])),
        (range(8), (0, 3, 6), (None, [])),
    ],
)
def test_the_newest_version_that_is_due_is_evaluated_and_those_before_it_are_passed_by(
    published: tuple[int, ...], settled: tuple[int, ...], actual: tuple[int | None, list[int]]
) -> None:
    assert due_version(published, 3, settled) == actual


@given(
    every=st.integers(1, 5),
    looks=st.lists(st.integers(0, 30)),
    earlier=st.sets(st.integers(0, 30)),
)
def test_each_version_that_is_due_is_settled_once_and_never_after_a_newer_one(
    every: int, looks: list[int], earlier: set[int]
) -> None:
    settled = {version for version in earlier if version % every == 0}
    evaluated_now: list[int] = []
    newest = 0
    for look in looks:
        newest = max(newest, look)
        version, passed = due_version(range(newest + 1), every, settled)
        assert not settled.intersection(passed)
        settled.update(passed)
        if version is not None:
            assert version > max(settled, default=-1)
            settled.add(version)
            evaluated_now.append(version)
        assert settled >= set(range(0, newest + 1, every))
    assert evaluated_now == sorted(set(evaluated_now))
    assert not earlier.intersection(evaluated_now)


def answer(version: int, example: str, **changes: object) -> Rollout:
    extra = {"phase": "periodic", "prompts": "2"}
    return replace(rollout(example, 0, policy_version=version, extra=extra, group_size=1), **changes)  # type: ignore[arg-type]


def test_an_evaluation_counts_once_all_its_answers_are_there() -> None:
    whole = [answer(0, "x"), answer(0, "y")]
    half = [answer(3, "x"), answer(3, "x")]
    sampled = [answer(12, f"{n}", group_size=2) for n in range(4)]
    too_few = [answer(15, f"{n}", group_size=2) for n in range(3)]
    others = [answer(6, example, extra={"phase": "first", "prompts": "1"}) for example in "xy"]
    elsewhere = [answer(9, example, environment="other") for example in "xy"]
    answers = [*whole, *half, *sampled, *too_few, *others, *elsewhere]
    assert evaluated_versions(answers, ["env", "new"]) == {"env": {0, 12}, "new": set()}
    assert evaluated_versions(answers, ["env", "other"]) == {"env": {0, 12}, "other": {9}}


def test_past_answers_are_read_once_and_none_is_kept() -> None:
    alive = weakref.WeakSet[Rollout]()

    def past() -> Iterator[Rollout]:
        for version in range(50):
            for example in "xy":
                read = answer(version, example, environment="env" if version % 2 else "other")
                alive.add(read)
                assert len(alive) <= 2
                yield read

    evaluated = evaluated_versions(past(), ["env", "other"])
    assert evaluated == {"env": {*range(1, 50, 2)}, "other": {*range(0, 50, 2)}}


def test_a_version_that_was_given_up_is_evaluated_once_more_for_each_later_request() -> None:
    first, second = (EvaluationRequest(version=4, wall_time=time) for time in (1.0, 2.0))
    settled = SettledVersions([2])
    settled.give_up(4, None)
    settled.reopen(first)
    assert settled.versions == {2}
    settled.give_up(4, first)
    settled.reopen(first)
    assert settled.versions == {2, 4}, "a request whose evaluation failed is not followed again and again"
    settled.reopen(second)
    assert settled.versions == {2}
    settled.reopen(EvaluationRequest(version=2, wall_time=3.0))
    assert settled.versions == {2}, "a version that was evaluated stays so"


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"evaluation\.concurrency is 0"):
        EvaluationConfig(concurrency=0)
