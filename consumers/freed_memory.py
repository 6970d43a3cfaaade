"""FreedMemory: gives the system back the memory that the C library keeps after it was freed.

glibc keeps memory that was freed between blocks that are still in use. Therefore a process that reads records of many
sizes, one piece after the other, grows with all that it has read, although it holds one piece at a time.
"""

import ctypes
import os

_STATM = "/proc/self/statm"


class FreedMemory:
    """The memory of this process that was freed. Without glibc or /proc, nothing is given back."""

    def __init__(self, grown_bytes: int) -> None:
        """Give memory back each time the process has grown by `grown_bytes`: memory that is used again costs page
        faults."""
        self._grown_bytes = grown_bytes
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.path.exists(_STATM) else None
        self._least_bytes = resident_bytes() if self._trim else 0

    def give_back(self) -> bool:
        """Give back what was freed, if the process has grown by that much since; return whether it did."""
        if self._trim is None or resident_bytes() < self._least_bytes + self._grown_bytes:
            return False
        self._trim(0)
        self._least_bytes = resident_bytes()
        return True


def use_c_library_for_arrow() -> None:
    """Have Arrow take its memory from the C library in this process, so that `give_back` covers what Arrow has freed.

    Arrow's own allocator keeps tens of MiB, but is up to a tenth faster: this is for processes that run for long.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


def resident_bytes() -> int:
    """Return the bytes of physical memory that this process has. Raises OSError without /proc."""
    with open(_STATM, encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
