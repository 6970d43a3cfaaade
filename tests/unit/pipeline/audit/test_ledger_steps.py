"""Steps are checked against batches row by row: a rollout is new exactly once, whichever learner draws it."""

from dataclasses import replace

import pytest

from rollstream.pipeline.audit.ledger import Ledger
from rollstream.pipeline.audit.ledger.batch_table import BatchTable
from rollstream.pipeline.audit.ledger.index import Entries
from rollstream.pipeline.audit.ledger.learners import Learners
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.pipeline.audit.texts import ledger_text
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep

ROWS = {"0-0": 4, "0-1": 4}


def use(what: str, *rows: int, batch: str = "0-0", again: bool = False) -> BatchUse:
    return BatchUse(
        batch_id=batch,
        index_offset=0,
        rows=len(rows) or 4,
        use=what,  # type: ignore[arg-type]
        reason="" if what == "trained" else "old",
        code="" if what == "trained" else "old_step",
        row_numbers=rows,
        again=again,
    )


def checked(*steps: tuple[BatchUse, ...]) -> Ledger:
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
    return judged(records, Entries(), 10)


def judged(steps: list[LearnerStep], entries: Entries, end: int) -> Ledger:
    """The ledger of a run with two batches, after a learner has taken these steps."""
    journal, table, result = PartitionJournal(0), BatchTable(), Ledger()
    journal.batches = 2
    for number, rows in enumerate(ROWS.values()):
        table.found(0, number, (0, number), rows)
    learners = Learners(KafkaConfig(), "run")
    learners.take(steps)
    learners.check(table, {}, {0: journal}, entries, end, result)
    return result


def test_rows_used_again_count_once() -> None:
    check = checked(
        (use("trained", 0, 1), use("trained", batch="0-1")),
        (use("trained", 2), use("trained", 0, again=True), use("trained", batch="0-1", again=True)),
        (use("skipped", 3), use("skipped", 0, 2, again=True)),
    )
    assert (check.trained, check.skipped, check.steps) == (7, 1, 3)
    assert check.problems == []


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
def test_contradictions_are_named(steps: list[tuple[BatchUse, ...]], problem: str) -> None:
    (actual,) = checked(*steps).problems
    assert actual.startswith(problem)


def test_skipped_rollouts_are_counted_by_the_code_of_the_reason() -> None:
    too_long = replace(use("skipped", 0, 1), reason="n" * 290, code="too_long")
    foreign = replace(use("skipped", 1, batch="0-1"), reason="left out as too_long: says a foreign trainer", code="")
    check = checked(
        (too_long, use("trained", 2)),
        (use("skipped", 3), foreign, replace(use("skipped", 2), again=True)),
    )
    assert check.as_dict()["skipped_as"] == {"old_step": 1, "other": 1, "too_long": 2}
    assert check.learners["l"]["skipped_as"] == check.skipped_as
    assert "      as too long " in ledger_text(check.as_dict())


def test_rows_that_a_learner_skipped_and_none_trained_on_are_found() -> None:
    steps = [
        replace(stands(n, 0), uses=uses) for n, uses in enumerate([(use("skipped", 1, 3),), (use("trained", 0, 3),)])
    ]
    for run, rows in (("run", {1}), ("another", set())):
        learners = Learners(KafkaConfig(), run)
        learners.take(steps)
        assert learners.untrained("0-0") == rows


def entries(*offsets: int) -> Entries:
    """An index with an entry at each offset, of batches 0-0, 0-1 and so on."""
    made = Entries()
    for number, offset in enumerate(offsets):
        entry = BatchIndexEntry(
            batch_id=f"0-{number}",
            partition=0,
            offset=number,
            rollouts=4,
            tokens=4,
            trained_tokens=4,
            lowest_version=0,
            highest_version=0,
            size_bytes=1,
            digest="d",
        )
        made.add(offset, entry)
    return made


def stands(number: int, position: int, *offsets: int, drawn: bool = False, batch: str = "") -> LearnerStep:
    """A step at a position that names batches 0-0, 0-1, ... of an index with an entry at 0, 2, 4, ..."""
    return LearnerStep(
        learner="l",
        step=number,
        input_run="run",
        uses=tuple(replace(use("trained", batch=batch or f"0-{at // 2}"), index_offset=at) for at in offsets),
        position=position,
        policy_version=-1,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
        stream_time_ms=7 if drawn else -1,
    )


@pytest.mark.parametrize(
    ("steps", "problems"),
    [
        ([stands(0, 0), stands(1, 3, 0, 2), stands(2, 5, 4)], []),
        ([stands(7, 5, 4), stands(8, 7, 6)], []),  # The first steps of this learner are another learner's.
        ([stands(0, 0), stands(1, 5, drawn=True), stands(2, 5, 0, drawn=True)], []),
        ([stands(0, 0), stands(1, 5, 4)], ["step 1 of learner l moved past 2 batches that no step names; the first i"]),
        (
            [stands(0, 0), stands(1, 3, 0, 2), stands(2, 7, 6)],
            ["step 2 of learner l moved past 1 batches that no step"],
        ),
        ([stands(1, 9, 0, 2, 4, 6)], ["step 1 of learner l is at index offset 9, but batch-index ends at 8"]),
        ([stands(1, 1, 0, batch="0-3")], ["step 1 of learner l names batch 0-3 at index offset 0, which names batch"]),
    ],
)
def test_a_position_is_as_far_as_the_steps_name_batches(steps: list[LearnerStep], problems: list[str]) -> None:
    # Two of the four batches in the index are in `batches`; another test covers the rows of the others.
    result = judged(steps, entries(0, 2, 4, 6), 8)
    result.problems = [text for text in result.problems if "rows of batch" not in text]
    assert [actual[: len(wanted)] for actual, wanted in zip(result.problems, problems, strict=True)] == problems
