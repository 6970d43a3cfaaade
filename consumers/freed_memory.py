"""When freed memory goes back to the system: seldom while a process uses memory again at once, and when it grew.

glibc keeps freed memory that lies between blocks still in use. Therefore a process that reads records of many sizes,
one piece after the other, grows with everything it reads, although it holds only one piece at a time.
"""

import ctypes
import os

_STATM = "/proc/self/statm"


class FreedMemory:
    """Freed memory of this process. Without glibc or /proc, nothing is returned to the system."""

    def __init__(self, grown_bytes: int) -> None:
        """Return memory each time the process has grown by `grown_bytes`, not more often, because memory that is used
        again costs page faults."""
        self._grown_bytes = grown_bytes
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.path.exists(_STATM) else None
        self._least_bytes = resident_bytes() if self._trim else 0

    def give_back(self) -> bool:
        """Return freed memory to the system if the process has grown by `grown_bytes` since the last time.

        Returns whether it did: never without glibc or without /proc.
        """
        if self._trim is None or resident_bytes() < self._least_bytes + self._grown_bytes:
            return False
        self._trim(0)
        self._least_bytes = resident_bytes()
        return True


def reuse_freed_memory() -> bool:
    """Make glibc keep freed arrays for the next ones, and Arrow, if it is imported later, allocate from glibc.

    By default, glibc returns arrays of 128 KiB or more to the system when they are freed, and the next array of that
    size pays for its pages again: twelve page faults, 20 to 40 us, for each rollout of 2,560 tokens. Returns whether
    it did: not with another C library, nor if variables of the environment say how glibc allocates.
    """
    if not MALLOC_SETTINGS.keys().isdisjoint(os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = all(mallopt(*setting) for setting in MALLOC_SETTINGS.values())
    if done:
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    return done


MALLOC_SETTINGS = {
    # At its upper limit: larger arrays have mappings of their own.
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 * 1024 * 1024),
    # How much may stay free at the end of a heap.
    "MALLOC_TRIM_THRESHOLD_": (-1, 64 * 1024 * 1024),
    # By how much a heap grows at least.
    "MALLOC_TOP_PAD_": (-2, 1024 * 1024),
}
"""Parameters of glibc's mallopt with their values in bytes, by the variables that set the same in a new process."""


def use_c_library_for_arrow() -> None:
    """Make Arrow allocate from the C library in this process, so that `give_back` covers memory that Arrow has freed.

    Arrow's own allocator keeps tens of MiB, but is up to 10 % faster, so call this only in long-running processes.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes. Raises OSError without /proc."""
    with open(_STATM, encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
