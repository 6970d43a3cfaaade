"""Restores of several tasks, some at once: through a client each, also after some that were broken off."""

from typing import Any

import pytest

from rollstream.consumers.grouping.process import restorer as restorers
from rollstream.consumers.grouping.process.restorer import Restorer
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.skipped_records import SkippedRecords
from tests.support.restoring import restore_all
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

PARTITIONS = 3


@pytest.fixture
def grouped(real_run: RealRun) -> RealRun:
    """A run whose grouping ended in order, with complete groups and open ones on each partition."""
    run = real_run
    run.topics = type(run.topics)(partitions=PARTITIONS)
    run.prepare()
    process = run.start("group")
    run.send([rollout(f"x{example}", member) for example in range(60) for member in range(3 + example % 2)])
    eventually(lambda: sum(map(len, run.read("batches"))) >= 120, 120, "the complete groups in batches")
    process.terminate()
    assert process.wait(60) == 0
    return run


@pytest.mark.parametrize("at_once", [1, 2, restorers.AT_ONCE])
def test_tasks_are_restored_at_once_through_a_client_each(
    grouped: RealRun, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(restorers, "AT_ONCE", at_once)
    built, reader = [], clients.reader

    def counted(*arguments: Any, **settings: Any) -> Any:
        built.append(arguments)
        return reader(*arguments, **settings)

    restorer = Restorer(grouped.kafka, grouped.name, grouped.grouper, "tester", SkippedRecords())
    monkeypatch.setattr(clients, "reader", counted)
    restorer.add(range(PARTITIONS))
    tasks = restore_all(restorer)
    assert len(built) == min(at_once, PARTITIONS)
    assert sorted(tasks) == list(range(PARTITIONS))
    assert sum(task.fold.open_groups for task in tasks.values()) == 30
    # A restore that is broken off leaves nothing behind that the next one would read.
    restorer.add(range(PARTITIONS))
    broken_off = 0
    for steps in range(1, 12):
        restorer.begin()
        for _ in range(steps):
            if restorer.step(0.0) is not None:
                break
        else:
            broken_off += 1
        restorer.withdraw([0])
        restorer.add([0])
    assert broken_off > 3
    again = restore_all(restorer)
    assert len(built) == 2 * min(at_once, PARTITIONS)
    assert {p: (t.fold.position, t.fold.in_flight, t.journal_offset) for p, t in again.items()} == {
        p: (t.fold.position, t.fold.in_flight, t.journal_offset) for p, t in tasks.items()
    }
    restorer.close()
