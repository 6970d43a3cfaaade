"""ReusedMemory: memory of arrays that are made again and again, in a size that changes little."""

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

_ALIGNED_BYTES = 64
"""XLA on a CPU takes an array that begins on such a boundary as it is, and copies others."""
_MOST_FREE_BYTES = 256 * 1024 * 1024


class ReusedMemory:
    """Blocks of memory that are used again once no array of theirs is left.

    The system hands out memory page by page, and cleared; on a virtual machine that takes longer than to fill it.
    Threads may share it.
    """

    def __init__(self, most_free_bytes: int = _MOST_FREE_BYTES) -> None:
        """Keep up to so many bytes in free blocks, those that became free last."""
        self._most_free_bytes = most_free_bytes
        self._free: list[NDArray[np.uint8]] = []
        # Blocks come back whenever an array ends, also while its thread takes one.
        self._lock = threading.RLock()

    @property
    def free_bytes(self) -> int:
        """Size of the blocks that wait to be used again."""
        return sum(block.nbytes for block in self._free)

    def lanes(self, count: int, size_bytes: int) -> list[NDArray[np.uint8]]:
        """Return `count` arrays of so many bytes with arbitrary values, each on a boundary of 64 bytes."""
        each = -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        block = self._block(count * each + _ALIGNED_BYTES)
        # Each array refers to `whole`, and that to the block. Were it a slice of the block, arrays would refer to the
        # block itself: numpy leaves out views between.
        whole = np.frombuffer(block.data, np.uint8)
        weakref.finalize(whole, self._give_back, block).atexit = False
        first = -block.ctypes.data % _ALIGNED_BYTES
        return [whole[begin : begin + size_bytes] for begin in range(first, first + count * each, each)]

    def _block(self, size_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            fits = [block for block in self._free if size_bytes <= block.nbytes <= 2 * size_bytes]
            if fits:
                smallest = min(fits, key=len)
                self._free = [block for block in self._free if block is not smallest]
                return smallest
        return np.empty(size_bytes, np.uint8)

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            self._free.append(block)
            while self.free_bytes > self._most_free_bytes:
                del self._free[0]
