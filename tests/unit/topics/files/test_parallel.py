"""Work in parallel: items are taken as threads become free, and any error ends it without waiting for stuck work."""

import threading
from collections.abc import Iterator

import pytest

from rollstream.topics.files.parallel import in_parallel


def nothing() -> None:
    """A check that finds no reason to end."""


def test_every_item_is_worked_on_once_whatever_the_number_of_threads() -> None:
    for threads in (1, 3, 50):
        results = in_parallel(range(20), lambda n: n * n, threads, check=nothing, ended=threading.Event())
        assert sorted(results) == [n * n for n in range(20)]


def test_no_item_is_taken_before_a_thread_is_free_for_it() -> None:
    taken, go = [], threading.Event()

    def items() -> Iterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    def work(number: int) -> int:
        assert go.wait(60)
        return number

    looked = []

    def check() -> None:
        if len(taken) >= 3:
            looked.append(len(taken))
            go.set()

    assert sorted(in_parallel(items(), work, 3, check=check, ended=threading.Event())) == list(range(10))
    assert looked[0] == 3


def test_errors_of_the_work_of_the_items_and_of_the_check_end_it() -> None:
    ended, forever = threading.Event(), threading.Event()

    def fails(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return 0 if ended.wait(60) else number

    with pytest.raises(ValueError, match="two"):
        list(in_parallel(range(5), fails, 4, check=nothing, ended=ended))
    assert ended.is_set(), "those at work are told"

    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError):
        list(in_parallel(broken(), abs, 2, check=nothing, ended=threading.Event()))

    def late() -> None:
        raise TimeoutError("late")

    with pytest.raises(TimeoutError):
        list(in_parallel([1], lambda _: forever.wait(60), 1, check=late, ended=threading.Event()))
    forever.set()
