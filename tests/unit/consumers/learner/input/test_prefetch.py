"""Prefetching: in order, no further ahead than asked for, errors where the result is wanted, nothing left behind."""

import threading

import pytest

from rollstream.consumers.learner.input.prefetch import Prefetcher
from tests.support.waiting import eventually


def test_results_come_in_order_and_then_it_ends() -> None:
    with Prefetcher(lambda number, _unwanted: number * 10, 3, 6) as prefetcher:
        assert [prefetcher.next(60) for _ in range(4)] == [30, 40, 50, 60]
        assert not prefetcher.ended
        assert prefetcher.next(60) is None
        assert prefetcher.ended


def test_it_works_ahead_but_no_further_than_asked() -> None:
    begun: list[int] = []

    def produce(number: int, _unwanted: threading.Event) -> int:
        begun.append(number)
        return number

    with Prefetcher(produce, 1, 100, depth=2) as prefetcher:
        # Two are ready, a third is made and waits for room.
        eventually(lambda: begun == [1, 2, 3], 60, "two ready and one in hand")
        assert prefetcher.next(60) == 1
        eventually(lambda: begun == [1, 2, 3, 4], 60, "one more for the one taken")


def test_none_ends_the_sequence() -> None:
    with Prefetcher(lambda number, _unwanted: number if number < 3 else None, 1, 9) as prefetcher:
        assert [prefetcher.next(60) for _ in range(3)] == [1, 2, None]
        assert prefetcher.ended
        assert prefetcher.next(0) is None


def test_what_was_raised_is_raised_where_the_result_is_wanted() -> None:
    def produce(number: int, _unwanted: threading.Event) -> int:
        if number == 2:
            raise LookupError("batch 0-7 is gone")
        return number

    with Prefetcher(produce, 1, 9) as prefetcher:
        assert prefetcher.next(60) == 1
        with pytest.raises(LookupError, match="batch 0-7 is gone"):
            prefetcher.next(60)
        assert prefetcher.next(0) is None


def test_closing_tells_whoever_waits_and_leaves_no_thread() -> None:
    def produce(number: int, unwanted: threading.Event) -> int | None:
        if number == 1:
            return number
        unwanted.wait(300)
        return None

    before = set(threading.enumerate())
    prefetcher = Prefetcher(produce, 1, 9)
    assert prefetcher.next(60) == 1
    assert prefetcher.next(0) is None
    assert not prefetcher.ended
    prefetcher.close()
    assert set(threading.enumerate()) <= before
