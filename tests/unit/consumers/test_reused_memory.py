"""Memory of freed arrays is used again; memory of arrays that still exist is not."""

import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.reused_memory import ReusedMemory

MIB = 1024 * 1024
PAGE = mmap.PAGESIZE


def address(memory: ReusedMemory, count: int = 3, size_bytes: int = 100) -> int:
    """Address of the first of some arrays, which are freed at once."""
    return int(memory.lanes(count, size_bytes)[0].ctypes.data)


def test_a_block_is_used_again_once_its_last_array_has_ended() -> None:
    memory = ReusedMemory(MIB)
    first, *others = memory.lanes(3, 100)
    begin = first.ctypes.data
    part = others[1][5:7].view(np.int16)
    del first, others
    assert address(memory) != begin, "a part of an array is left"
    del part
    assert begin in {address(memory), address(memory)}


def test_a_copy_uses_a_free_block_too() -> None:
    memory = ReusedMemory(4 * MIB)
    original = np.arange(MIB // 2, dtype=np.float32).reshape(512, 1024).T
    begin = address(memory, 1, original.nbytes)
    copy = memory.copy_of(original)
    assert copy.ctypes.data == begin
    np.testing.assert_array_equal(copy, original)


@pytest.mark.parametrize("held_by", [memoryview, np.frombuffer, lambda lane: memoryview(lane).toreadonly()[7:9]])
def test_a_view_of_any_kind_keeps_its_block(held_by: Callable[[Any], Any]) -> None:
    memory = ReusedMemory(MIB)
    lane = memory.lanes(1, PAGE)[0]
    view = held_by(lane)
    del lane
    assert memory.free_bytes == 0
    del view
    assert memory.free_bytes == PAGE


def test_what_a_device_holds_stays_as_it_is() -> None:
    memory = ReusedMemory(MIB)
    lane = memory.lanes(1, 4096)[0]
    lane.fill(1)
    placed = jax.device_put(lane)
    assert placed.unsafe_buffer_pointer() == lane.ctypes.data
    del lane
    memory.lanes(1, 4096)[0].fill(2)
    assert (np.asarray(placed) == 1).all()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5000), st.booleans()), max_size=30))
def test_arrays_that_are_there_together_lie_apart(requests: list[tuple[int, int, bool]]) -> None:
    memory, kept = ReusedMemory(MIB), []
    for number, (count, size_bytes, keeps) in enumerate(requests):
        lanes = memory.lanes(count, size_bytes)
        assert [len(lane) for lane in lanes] == [size_bytes] * count
        assert not any(lane.ctypes.data % 64 for lane in lanes)
        for lane in lanes:
            lane.fill(number)
        if keeps:
            kept.append((number, lanes))
    for number, lanes in kept:
        assert all((lane == number).all() for lane in lanes)


@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(0, 9)), max_size=40), st.sampled_from([0, 4 * MIB]))
def test_no_more_than_allowed_is_free_at_any_time(steps: list[tuple[int, int]], limit: int) -> None:
    memory, kept = ReusedMemory(limit), list[list[np.ndarray]]()
    for size_bytes, place in steps:
        if place < len(kept):
            del kept[place]
        kept.append(memory.lanes(1, size_bytes))
        assert memory.free_bytes <= limit
    kept.clear()
    assert memory.free_bytes <= limit


def test_without_a_limit_it_never_takes_more_than_arrays_alone_have_taken() -> None:
    memory = ReusedMemory()
    whole = memory.lanes(1, 10 * MIB)[0]
    parts = [memory.lanes(1, MIB)[0] for _ in range(10)]
    assert memory.free_bytes == 0
    del whole
    assert memory.free_bytes == 10 * MIB, "the whole and the parts were there together"
    again = [memory.lanes(1, MIB)[0] for _ in range(3)]
    assert memory.free_bytes == 0, "the block is too large for the new parts, and makes room for them"
    begin = parts[0].ctypes.data
    del parts[0]
    assert memory.free_bytes == MIB
    again.append(memory.lanes(1, MIB)[0])
    assert again[-1].ctypes.data == begin


def test_a_block_of_more_than_twice_the_size_is_not_used() -> None:
    memory = ReusedMemory(MIB)
    begin = address(memory, 1, 12 * PAGE)
    assert address(memory, 1, 5 * PAGE) != begin
    assert address(memory, 1, 6 * PAGE) == begin


def test_the_block_that_has_been_free_longest_is_dropped_first() -> None:
    memory = ReusedMemory(5 * PAGE)
    together = [memory.lanes(1, PAGE) for _ in range(20)]
    assert memory.free_bytes == 0
    last = together[-1][0].ctypes.data
    while together:
        del together[0]
    assert memory.free_bytes == 5 * PAGE
    assert address(memory, 1, PAGE) == last
    memory.lanes(1, 6 * PAGE)
    assert memory.free_bytes == 0, "one block of more than the limit takes the place of all, and is not kept either"


def test_a_copy_is_equal_and_of_its_own() -> None:
    memory = ReusedMemory()
    original = np.arange(MIB, dtype=np.float32).reshape(1024, 1024).T
    for array in (original, original[:3]):
        copy = memory.copy_of(array)
        assert copy.flags.c_contiguous
        assert copy.dtype == array.dtype
        np.testing.assert_array_equal(copy, array)
        assert not np.shares_memory(copy, array)


def test_too_much_is_a_memory_error_and_takes_nothing() -> None:
    memory = ReusedMemory(MIB)
    for size_bytes in (2**62, 2**80):
        with pytest.raises(MemoryError, match="bytes"):
            memory.lanes(1, size_bytes)
    address(memory, 1, PAGE)
    assert memory.free_bytes == PAGE


def in_its_memory(frame: FrameType, event: str) -> bool:
    """Whether a function of ReusedMemory is being called; some of them are called while it holds its lock."""
    return event == "call" and frame.f_code.co_filename.endswith("reused_memory.py")


def test_threads_that_share_it_never_share_a_block() -> None:
    memory = ReusedMemory(2 * 4096)  # One block at most is free, for which all threads compete.

    def let_others_run(frame: FrameType, event: str, _argument: object) -> None:
        if in_its_memory(frame, event):
            os.sched_yield()
            time.sleep(0)

    def work(number: int) -> list[int]:
        wrong: list[int] = []
        sys.setprofile(let_others_run)
        for _ in range(80):
            lanes = memory.lanes(2, 4096)
            for lane in lanes:
                lane.fill(number)
            wrong.extend(int(lane[0]) for lane in lanes if not (lane == number).all())
        sys.setprofile(None)
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[]] * 4
    assert memory.free_bytes <= 2 * 4096


def test_the_garbage_collector_may_return_blocks_at_any_place() -> None:
    memory = ReusedMemory(MIB)
    rings: list[Any] = []

    def collect(frame: FrameType, event: str, _argument: object) -> None:
        if in_its_memory(frame, event) and rings:
            rings.pop()
            gc.collect()

    def work() -> None:
        for _ in range(5):
            for size in range(1, 20):
                ring: list[Any] = [memory.lanes(1, size * PAGE)]
                ring.append(ring)  # Only the collector ends this list.
                rings.append(ring)
                del ring
            sys.setprofile(collect)
            for _ in range(3):
                memory.lanes(1, 2 * PAGE)
            sys.setprofile(None)

    gc.freeze()  # The collector is fast if it looks at objects of this test alone.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    gc.unfreeze()
    assert not thread.is_alive(), "a block that comes back inside the lock waits for the lock"
    rings.clear()
    gc.collect()
    assert 0 < memory.free_bytes <= MIB
    before = memory.free_bytes
    address(memory, 1, PAGE)
    assert memory.free_bytes == before, "no block is waiting to be taken over"
