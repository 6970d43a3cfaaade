"""Readers over a model of Kafka, while grouping was asked to skip an offset and has not decided yet.

A task reads requests only when it starts, so it may read the offset nevertheless; a reader that left it out then reads
it, too.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.pipeline.audit.ledger import LiveLedger, ledger
from rollstream.pipeline.audit.place_index import PlaceIndex
from rollstream.pipeline.ui.index.log_source import DECISION_EVERY_S, TopicSource
from rollstream.topics.codec import encode
from rollstream.topics.keys import encode_key
from rollstream.topics.records import SkippedOffset
from tests.simulation.installation import World, installed
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with installed(world):
        yield world


@pytest.fixture
def run(world: World) -> ModelledRun:
    run = ModelledRun(world)
    run.send()
    run.group()
    return run


def ask(run: ModelledRun, offset: int) -> None:
    """Ask grouping to skip an offset."""
    wanted = SkippedOffset(partition=0, offset=offset, reason="a test", wall_time=0.0)
    run.write("control", encode_key("skip", f"0:{offset}"), encode(wanted))


def group(run: ModelledRun, *, follow_requests: bool) -> None:
    """Group what was sent, by a task that reads the requests or has started before they were made."""
    control = run.log("control")
    if not follow_requests:
        control.begin = control.end
    run.group(batches=2 - follow_requests)
    control.begin = 0


@pytest.mark.parametrize("follow_requests", [False, True])
def test_a_live_ledger_is_that_of_all_topics_whether_a_request_is_followed_or_not(
    world: World, run: ModelledRun, tmp_path: Path, follow_requests: bool
) -> None:
    run.send()
    offset = run.log("rollouts").end - 2
    ask(run, offset)
    path = tmp_path / "live" / "file"
    with LiveLedger(KAFKA, RUN, path) as live:
        book = world.result_of(live.poll)
        assert (book.problems, book.unread) == ([], 4)
    group(run, follow_requests=follow_requests)
    with LiveLedger(KAFKA, RUN, path) as live:
        book = world.result_of(live.poll)
        assert live.begun_anew == ""
        assert book == world.result_of(lambda: ledger(KAFKA, RUN))
        assert book.problems == []
        assert (book.batched, book.dropped) == ((4, {"skipped": 1}) if follow_requests else (8, {}))
        assert world.result_of(live.poll) == book


@pytest.mark.parametrize("follow_requests", [False, True])
def test_an_index_of_places_holds_an_offset_that_grouping_read_despite_a_request(
    world: World, run: ModelledRun, tmp_path: Path, follow_requests: bool
) -> None:
    def places(index: PlaceIndex) -> list[int]:
        world.result_of(index.update)
        return [offset for (offset,) in index.db.execute("select offset from rollouts order by offset")]

    run.send()
    end = run.log("rollouts").end
    ask(run, end - 2)
    with PlaceIndex(KAFKA, RUN, tmp_path / "file") as index:
        before = [*range(end - 9, end - 5), end - 4, end - 3, end - 1]  # A mark lies between the batches.
        assert places(index) == before
        assert places(index) == before
        group(run, follow_requests=follow_requests)
        for _ in range(2):
            assert places(index) == sorted(before if follow_requests else [*before, end - 2])
        assert not index.db.execute("select * from left_out").fetchall()


@pytest.mark.parametrize("follow_requests", [False, True])
def test_the_page_shows_what_lies_at_a_requested_offset_once_grouping_has_decided(
    world: World, run: ModelledRun, follow_requests: bool
) -> None:
    run.send()
    end = run.log("rollouts").end
    ask(run, end - 2)

    def polled(source: TopicSource) -> dict[int, bool]:
        """Whether each record is readable, by offset."""
        records = [record for _ in range(20) for record in source.poll(True, 100, 0.0)]
        return {record.offset: record.readable for record in records}

    source = world.result_of(lambda: TopicSource(KAFKA, RUN))
    world.result_of(lambda: source.begin({("rollouts", 0): end - 4}))
    assert world.result_of(lambda: polled(source)) == {end - 4: True, end - 3: True}
    assert ("rollouts", 0) not in source.ends()
    group(run, follow_requests=follow_requests)
    world.scheduler.now_s += DECISION_EVERY_S
    assert world.result_of(lambda: polled(source)) == {end - 2: not follow_requests, end - 1: True}
    assert source.ends()["rollouts", 0] == run.log("rollouts").end
