"""Memory of freed arrays is used again; memory of arrays that still exist is not."""

import threading

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.learner.input.reused_memory import ReusedMemory


def address(memory: ReusedMemory, count: int = 3, size_bytes: int = 100) -> int:
    """Address of the first of some arrays, which are freed at once."""
    return int(memory.lanes(count, size_bytes)[0].ctypes.data)


def test_a_block_is_used_again_once_its_last_array_has_ended() -> None:
    memory = ReusedMemory()
    first, *others = memory.lanes(3, 100)
    begin = first.ctypes.data
    part = others[1][5:7].view(np.int16)
    del first, others
    assert address(memory) != begin, "a part of an array is left"
    del part
    assert begin in {address(memory), address(memory)}


def test_what_a_device_holds_stays_as_it_is() -> None:
    memory = ReusedMemory()
    lane = memory.lanes(1, 4096)[0]
    lane.fill(1)
    placed = jax.device_put(lane)
    assert placed.unsafe_buffer_pointer() == lane.ctypes.data
    del lane
    memory.lanes(1, 4096)[0].fill(2)
    assert (np.asarray(placed) == 1).all()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5000), st.booleans()), max_size=30))
def test_arrays_that_are_there_together_lie_apart(requests: list[tuple[int, int, bool]]) -> None:
    memory, kept = ReusedMemory(), []
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


def test_a_block_of_more_than_twice_the_size_is_not_used() -> None:
    memory = ReusedMemory()
    begin = address(memory, size_bytes=1000)
    assert address(memory, size_bytes=300) != begin


def test_free_blocks_are_kept_up_to_a_limit() -> None:
    memory = ReusedMemory(most_free_bytes=5000)
    together = [memory.lanes(1, 960) for _ in range(20)]
    assert memory.free_bytes == 0
    together.clear()
    assert memory.free_bytes == 4 * 1024
    memory.lanes(1, 6000)
    assert memory.free_bytes == 0, "one block of more than the limit takes the place of all, and is not kept either"


def test_threads_that_share_it_never_share_a_block() -> None:
    memory, wrong = ReusedMemory(), list[int]()

    def work(number: int) -> None:
        for _ in range(300):
            lanes = memory.lanes(2, 4096)
            for lane in lanes:
                lane.fill(number)
            wrong.extend(int(lane[0]) for lane in lanes if not (lane == number).all())

    working = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    assert not wrong
