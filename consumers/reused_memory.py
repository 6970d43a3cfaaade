"""ReusedMemory: memory for arrays that are allocated again and again in similar sizes."""

import contextlib
import mmap
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_ALIGNED_BYTES = 64
"""XLA on a CPU uses an array in place if it begins at a multiple of this many bytes, and copies it otherwise."""
_LARGE_BYTES = 1024 * 1024
"""Free blocks of this size or more are left to the system; the C library reuses smaller arrays by itself."""


class _Free(NamedTuple):
    """A free block."""

    freed: int
    """How many blocks became free before it."""
    block: mmap.mmap


class ReusedMemory:
    """Blocks of memory that are reused once no array refers to them.

    The operating system allocates and clears memory page by page; on a virtual machine this takes longer than filling
    it. When the system runs short of memory, it may take the pages of large free blocks. Threads may share an instance.
    """

    def __init__(self, most_free_bytes: int | None = None) -> None:
        """Keep at most `most_free_bytes` in free blocks, those that became free last. If it is None, free blocks and
        blocks in use together never exceed the peak of the blocks in use."""
        self._most_free_bytes = most_free_bytes
        self._lock = threading.Lock()
        self._used_bytes = self._most_used_bytes = self._free_bytes = self._freed = 0
        self._free: dict[int, deque[_Free]] = {}
        """By size, in the order in which they became free."""
        self._returned: deque[mmap.mmap] = deque()
        """Blocks that just became free. Any thread may add to it at any time, even one that holds the lock, because
        the garbage collector may run anywhere."""

    @property
    def free_bytes(self) -> int:
        """Total size of the free blocks."""
        return self._free_bytes

    def lanes(self, count: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return arbitrary bytes, [count, size_bytes], in which each lane begins on a boundary of 64 bytes.

        Raises MemoryError if there is not enough memory.
        """
        each = max(1, -(-size_bytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES
        block = self._block(count * each)
        try:
            # All views refer to `whole`, also indirectly, so the block is free once `whole` ends.
            whole = np.frombuffer(block, np.uint8, count * each)
            weakref.finalize(whole, self._give_back, block).atexit = False
        except BaseException:
            self._give_back(block)
            raise
        lanes: NDArray[np.uint8] = whole.reshape(count, each)[:, :size_bytes]
        return lanes

    def copy_of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy in C order. Raises MemoryError if there is not enough memory."""
        if array.nbytes < _LARGE_BYTES:
            return np.array(array, order="C")
        copy: NDArray[Any] = self.lanes(1, array.nbytes)[0].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def _block(self, least_bytes: int) -> mmap.mmap:
        size_bytes = max(1, -(-least_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._settle()
        try:
            with self._lock:
                block = self._take(size_bytes)
                used_bytes = self._used_bytes + (size_bytes if block is None else len(block))
                most_used_bytes = max(self._most_used_bytes, used_bytes)
                # Free blocks are dropped first, so that the limit also holds while a block is allocated.
                self._shrink(most_used_bytes - used_bytes)
                if block is None:
                    block = self._new(size_bytes)
                self._used_bytes, self._most_used_bytes = used_bytes, most_used_bytes
                return block
        finally:
            self._settle()

    def _new(self, size_bytes: int) -> mmap.mmap:
        try:
            return _new_block(size_bytes)
        except MemoryError:
            if not self._free:
                raise
        self._free.clear()
        self._free_bytes = 0
        return _new_block(size_bytes)

    def _take(self, size_bytes: int) -> mmap.mmap | None:
        """Remove and return the smallest free block that fits and is not much too large."""
        fits = [size for size, blocks in self._free.items() if blocks and size_bytes <= size <= 2 * size_bytes]
        return self._remove(min(fits), newest=True) if fits else None

    def _remove(self, size: int, *, newest: bool) -> mmap.mmap:
        blocks = self._free[size]
        self._free_bytes -= size
        free = blocks.pop() if newest else blocks.popleft()
        if not blocks:
            self._free.pop(size)
        return free.block

    def _shrink(self, unused_bytes: int) -> None:
        """Drop the free blocks beyond the limit; without one, `unused_bytes` is the limit."""
        limit = unused_bytes if self._most_free_bytes is None else self._most_free_bytes
        while self._free_bytes > limit:
            first = {blocks[0].freed: size for size, blocks in self._free.items() if blocks}
            self._remove(first[min(first)], newest=False)

    def _give_back(self, block: mmap.mmap) -> None:
        self._returned.append(block)
        self._settle()

    def _settle(self) -> None:
        """Take over the returned blocks, unless the lock is taken: then its holder does so once it has released it."""
        taken = True
        while taken and self._returned:
            taken = False
            try:
                taken = self._lock.acquire(blocking=False)
                if taken:
                    self._take_over()
            finally:
                if taken:
                    self._lock.release()

    def _take_over(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            size = len(block)
            self._used_bytes -= size
            self._free.setdefault(size, deque()).append(_Free(self._freed, block))
            self._free_bytes += size
            self._freed += 1
            if size >= _LARGE_BYTES:
                _advise(block, "MADV_FREE")
            self._shrink(self._most_used_bytes - self._used_bytes)


def _new_block(size_bytes: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there is no memory for an array of {size_bytes} bytes") from error
    _advise(block, "MADV_HUGEPAGE")
    return block


def _advise(block: mmap.mmap, name: str) -> None:
    """Give the system a hint, where it knows such a hint."""
    advice = getattr(mmap, name, None)
    if advice is not None:
        with contextlib.suppress(OSError):
            block.madvise(advice)
