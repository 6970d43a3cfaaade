"""ReusedMemory: memory for arrays that are allocated again and again in similar sizes."""

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

_ALIGNED_BYTES = 64
"""XLA on a CPU uses an array in place if it begins at a multiple of this many bytes, and copies it otherwise."""
_MOST_FREE_BYTES = 256 * 1024 * 1024


class ReusedMemory:
    """Blocks of memory that are reused once no array refers to them.

    The operating system allocates and clears memory page by page; on a virtual machine this takes longer than filling
    it. Threads may share an instance.
    """

    def __init__(self, most_free_bytes: int = _MOST_FREE_BYTES) -> None:
        """Keep at most `most_free_bytes` in free blocks: the blocks that became free last."""
        self._most_free_bytes = most_free_bytes
        self._free: list[NDArray[np.uint8]] = []
        # Reentrant: an array may be garbage-collected, which returns its block, while its thread holds the lock.
        self._lock = threading.RLock()

    @property
    def free_bytes(self) -> int:
        """Total size of the free blocks."""
        return sum(block.nbytes for block in self._free)

    def lanes(self, count: int, size_bytes: int) -> list[NDArray[np.uint8]]:
        """Return `count` arrays of `size_bytes` bytes with arbitrary values, each on a boundary of 64 bytes."""
        each = -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        block = self._block(count * each + _ALIGNED_BYTES)
        # Each array refers to `whole`, which refers to the block. If `whole` were a slice of the block, numpy would let
        # the arrays refer to the block directly, and the block would count as free too early.
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
