"""The keeper of a ledger reports why a proof failed, keeps the newest ledger, and proves the next revision."""

import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.pipeline.ui.server import ledger_keeper
from rollstream.pipeline.ui.server.ledger_keeper import LedgerKeeper
from rollstream.topics.errors import StateRefused
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    "error", [StateRefused("no journal"), OSError("disk full"), sqlite3.OperationalError("locked")]
)
def test_a_proof_that_fails_is_reported_and_the_next_one_is_shown(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_keeper, "LEAST_REST_S", 0.0)
    problem_seen = threading.Event()

    def third() -> dict[str, Any]:
        assert problem_seen.wait(60)
        return {"rollouts": 3}

    outcomes: list[Callable[[], dict[str, Any]]] = [lambda: {"rollouts": 1}, lambda: _fail(error), third]
    proven: list[int] = []

    def prove() -> dict[str, Any]:
        proven.append(1)
        return outcomes[len(proven) - 1]()

    keeper = LedgerKeeper(prove, lambda: min(len(proven), 2))

    eventually(lambda: keeper.answer()["ledger"] == {"rollouts": 1}, 60, "the first ledger")
    eventually(lambda: str(error) in str(keeper.answer()["problem"]), 60, "the problem")
    assert keeper.answer()["ledger"] == {"rollouts": 1}
    problem_seen.set()
    eventually(lambda: keeper.answer()["ledger"] == {"rollouts": 3}, 60, "the next ledger")
    assert keeper.answer()["problem"] is None
    assert not keeper.answer()["running"]


def test_a_ledger_that_is_to_be_proven_again_after_its_pause_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks again as long as this is so; a run that ended has no other reason to ask."""
    monkeypatch.setattr(ledger_keeper, "LEAST_REST_S", 1000.0)
    revision = [0]
    keeper = LedgerKeeper(lambda: {"rollouts": revision[0]}, lambda: revision[0])
    assert keeper.answer()["running"], "the first request begins the proof"
    eventually(lambda: not keeper.answer()["running"], 60, "the first ledger")
    revision[0] = 1
    answer = keeper.answer()
    assert (answer["ledger"], answer["running"]) == ({"rollouts": 0}, True)


def test_an_undecided_ledger_is_proven_again_although_the_run_shows_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that hides records may be aborted, and the ledger is the first to show it."""
    monkeypatch.setattr(ledger_keeper, "LEAST_REST_S", 0.0)
    books = [{"undecided": ["a record"]}, {"undecided": []}, {"undecided": ["never read"]}]
    keeper = LedgerKeeper(lambda: books.pop(0), lambda: "the same")
    eventually(lambda: keeper.answer()["ledger"] == {"undecided": []}, 60, "the decided ledger")
    assert not keeper.answer()["running"]
    assert len(books) == 1


def _fail(error: Exception) -> dict[str, Any]:
    raise error
