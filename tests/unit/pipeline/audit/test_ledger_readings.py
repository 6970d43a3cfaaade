"""A ledger over a model of Kafka: what happens to the topics while they are read does not count as a loss."""

from collections.abc import Iterator

import pytest

from rollstream.pipeline.audit.ledger.proof import Books, ledger
from tests.simulation.installation import World, installed
from tests.simulation.partition_log import Entry
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with installed(world):
        yield world


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("after", ["journal", "batches", "rollouts"])
def test_a_prune_while_the_ledger_reads_is_no_loss(world: World, after: str, read_before: bool) -> None:
    run = ModelledRun(world)
    for _ in range(4):
        run.send()
        run.group()
    books = world.result_of(lambda: Books(KAFKA, RUN))
    if read_before:
        world.result_of(books.read)
        run.send()
        run.group()
    log, pruned = run.log(after), []
    visible = log.visible

    def read_then_prune(start: int, most: int, committed: bool) -> tuple[list[Entry], int]:
        answer = visible(start, most, committed)
        if not pruned:
            pruned.append(after)
            run.prune(2)
        return answer

    log.visible = read_then_prune  # type: ignore[method-assign]
    book = world.result_of(books.read)
    assert pruned
    assert book.problems == []
    assert book.balanced
    assert (book.batches, book.batched) == ((5, 20) if read_before else (4, 16))
    whole = world.result_of(lambda: ledger(KAFKA, RUN))
    assert (whole.problems, whole.batched, whole.pruned) == ([], book.batched, book.pruned)
