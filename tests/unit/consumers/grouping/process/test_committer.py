"""A batch does not wait for its transaction, and transactions stay few."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.consumers.grouping.process.committer import GATHER_S, CommitPace, Committer


class Time:
    now = 0.0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def pace(time: Time) -> CommitPace:
    return CommitPace(0.03, 500, lambda: time.now)


def test_a_batch_is_due_as_soon_as_the_transaction_before_has_ended(pace: CommitPace) -> None:
    pace.passed(8)
    assert not pace.is_due(batches=True, free=False)
    assert pace.wait_s(batches=True, free=False) == GATHER_S
    assert pace.is_due(batches=True, free=True)


def test_anything_else_waits_for_the_interval_from_the_first_record_on(pace: CommitPace, time: Time) -> None:
    pace.passed(1)
    time.now = 0.02
    pace.passed(1)
    assert not pace.is_due(batches=False, free=True)
    assert pace.wait_s(batches=False, free=True) == pytest.approx(0.01)
    time.now = 0.03
    assert not pace.is_due(batches=False, free=False)
    assert pace.is_due(batches=False, free=True)


def test_reading_waits_for_the_transaction_once_enough_was_read(pace: CommitPace) -> None:
    pace.passed(499)
    assert not pace.is_due(batches=False, free=False)
    pace.passed(1)
    assert pace.is_due(batches=False, free=False)


def test_a_poll_waits_for_the_interval_while_there_is_nothing_to_commit(pace: CommitPace) -> None:
    pace.passed(500)
    pace.begun()
    pace.passed(0)
    assert pace.wait_s(batches=False, free=True) == 0.03


def test_polls_become_fewer_the_longer_a_transaction_takes(pace: CommitPace, time: Time) -> None:
    pace.begun()
    pace.passed(1)
    time.now = 0.08
    assert pace.wait_s(batches=True, free=False) == pytest.approx(0.02)
    time.now = 5.0
    assert pace.wait_s(batches=True, free=False) == 0.03
    assert pace.wait_s(batches=False, free=True) == GATHER_S


def test_changes_without_records_wait_as_long(pace: CommitPace, time: Time) -> None:
    assert not pace.is_due(batches=False, free=True)
    time.now = 0.03
    assert pace.is_due(batches=False, free=True)


def test_a_poll_is_no_longer_than_an_interval_below_the_gathering(time: Time) -> None:
    pace = CommitPace(0.001, 500, lambda: time.now)
    pace.passed(1)
    assert pace.wait_s(batches=True, free=True) == 0.001


def test_effects_are_prepared_once_the_transaction_before_has_ended() -> None:
    """What a task commits follows from the offsets of the records that it committed before."""
    steps: list[str] = []
    effects = SimpleNamespace(encoded=(), dead_letters=(), batches=())

    class Task:
        def prepare_commit(self, *, closing: bool) -> Any:
            steps.append("prepare")
            return SimpleNamespace(effects=effects)

    publisher: Any = SimpleNamespace(
        settle=lambda: steps.append("settle"), begin=lambda _commits: steps.append("begin"), latest_s=0.0
    )
    figures: Any = SimpleNamespace(committed=lambda _effects, _seconds: None)
    committer, task = Committer("main", "main.grouper", publisher, figures), Task()
    for _commit in range(2):
        committer.begin([task])  # type: ignore[list-item]
    assert steps == ["settle", "prepare", "begin"] * 2
