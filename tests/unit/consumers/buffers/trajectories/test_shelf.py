"""Copies by two threads are complete for any size and layout, also in forked processes."""

import os

import numpy as np
import pytest

from rollstream.consumers.buffers.trajectories.shelf import LARGE_BYTES, copy_rows


@pytest.mark.parametrize("rows", [0, 1, 2, 7, LARGE_BYTES // 8 - 1, LARGE_BYTES // 8, LARGE_BYTES // 8 + 1])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_copy_is_whole(rows: int, order: str) -> None:
    source = np.asarray(np.arange(2 * rows, dtype=np.int64).reshape(rows, 2), order=order)[:, ::-1]
    room = np.full((rows + 2, 2), -1, np.int64)
    copy_rows(room[1:-1], source)
    np.testing.assert_array_equal(room[1:-1], source)
    assert (room[[0, -1]] == -1).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_copies_too() -> None:
    source = np.arange(LARGE_BYTES, dtype=np.int64)
    copy_rows(np.empty_like(source), source)
    child = os.fork()
    if not child:
        copied = np.empty_like(source)
        copy_rows(copied, source)
        os._exit(0 if (copied == source).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
