"""Steps against batches, row by row: each rollout once for the first time, whoever draws from a buffer."""

from dataclasses import replace

import pytest

from pipeline.journals import PartitionJournal
from pipeline.ledger import Ledger
from pipeline.ledger.learners import check_steps
from topics.records import BatchUse, LearnerStep

ROWS = {"0-0": 4, "0-1": 4}


def use(what: str, *rows: int, batch: str = "0-0", again: bool = False) -> BatchUse:
    return BatchUse(
        batch_id=batch,
        index_offset=0,
        rows=len(rows) or 4,
        use=what,  # type: ignore[arg-type]
        reason="" if what == "trained" else "old",
        row_numbers=rows,
        again=again,
    )


def checked(*steps: tuple[BatchUse, ...]) -> Ledger:
    journal, result = PartitionJournal(0, lambda _text: None), Ledger()
    journal.batches = 2
    records = [
        LearnerStep(
            learner="l",
            step=number + 1,
            input_run="run",
            uses=uses,
            position=0,
            policy_version=-1,
            params_digest="d",
            trained_total=0,
            skipped_total=0,
        )
        for number, uses in enumerate(steps)
    ]
    check_steps(records, ROWS, {0: journal}, "run", result)
    return result


def test_rows_used_again_count_once() -> None:
    found = checked(
        (use("trained", 0, 1), use("trained", batch="0-1")),
        (use("trained", 2), use("trained", 0, again=True), use("trained", batch="0-1", again=True)),
        (use("skipped", 3), use("skipped", 0, 2, again=True)),
    )
    assert (found.trained, found.skipped, found.steps) == (7, 1, 3)
    assert found.problems == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([(use("trained", 0, 1),), (use("trained", 1, 2),)], "step 2 of learner l uses batch 0-0 a second time"),
        ([(use("skipped", 3),), (use("trained"),)], "step 2 of learner l uses batch 0-0 a second time"),
        ([(use("trained"),), (use("skipped", 3),)], "step 2 of learner l uses batch 0-0 a second time"),
        ([(use("trained", 0, again=True),)], "step 1 of learner l uses rollouts of batch 0-0 again that it had not"),
        ([(use("skipped", 0),), (use("trained", 0, again=True),)], "step 2 of learner l uses rollouts of batch 0-0 ag"),
        ([(use("trained", 2, 4),)], "step 1 of learner l used 2 rows of batch 0-0, which has 4"),
        ([(replace(use("trained", 1, 2), rows=3),)], "step 1 of learner l used 3 rows of batch 0-0, which has 4"),
        ([(use("trained", batch="0-7"),)], "step 1 of learner l used 4 rows of batch 0-7, which has none"),
    ],
)
def test_what_does_not_add_up_is_named(steps: list[tuple[BatchUse, ...]], problem: str) -> None:
    (found,) = checked(*steps).problems
    assert found.startswith(problem)
