"""A ledger over a model of Kafka: what happens to the topics while they are read does not count as a loss."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.pipeline.audit.ledger import LiveLedger, ledger
from tests.simulation.group_coordinator import Committed
from tests.simulation.installation import World
from tests.simulation.partition_log import Entry
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("after", ["journal", "batches", "rollouts"])
def test_a_prune_while_the_ledger_reads_is_no_loss(world: World, tmp_path: Path, after: str, read_before: bool) -> None:
    run = ModelledRun(world)
    for _ in range(4):
        run.send()
        run.group()
    books = LiveLedger(KAFKA, RUN, tmp_path / "books")
    if read_before:
        world.result_of(books.poll)
        run.send()
        run.group()
    log, pruned = run.log(after), []
    visible = log.visible

    def read_then_prune(*words: Any) -> tuple[list[Entry], int]:
        answer = visible(*words)
        if not pruned:
            pruned.append(after)
            run.prune(2)
        return answer

    log.visible = read_then_prune  # type: ignore[method-assign]
    # What was read may name what was deleted, so everything is read again.
    book = world.result_of(books.poll if read_before else lambda: ledger(KAFKA, RUN))
    assert pruned
    assert not read_before or "were deleted" in books.begun_anew
    assert book.problems == []
    assert book.balanced
    assert (book.batches, book.batched) == ((5, 20) if read_before else (4, 16))
    whole = world.result_of(lambda: ledger(KAFKA, RUN))
    assert (whole.problems, whole.batched, whole.pruned) == ([], book.batched, book.pruned)


@pytest.mark.parametrize(
    ("position", "problem"),
    [
        (
            -1001,
            "begins at offset 2, but no position is committed: commit it again with `rollstream role label recover`",
        ),
        (0, "begins at offset 2, and group modelled.labeller has read up to 0: 2 offsets were deleted unread"),
        (2, None),
    ],
)
def test_labels_that_were_pruned_count_as_lost_only_if_a_position_on_record_says_so(
    world: World, position: int, problem: str | None
) -> None:
    run = ModelledRun(world)
    for _ in range(3):
        run.write("unlabelled", b"[]", b"value")
    run.log("unlabelled").begin = 2
    if position >= 0:
        place = f"{RUN}.unlabelled", 0
        run.cluster.groups[f"{RUN}.labeller"].offsets[place] = Committed(position, f"id {position} 0 0 0 0")
    book = world.result_of(lambda: ledger(KAFKA, RUN))
    assert [text.partition(" ")[2] for text in book.problems] == ([problem] if problem else [])
