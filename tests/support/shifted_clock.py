"""Wall clocks of processes that jump: a library in front of libc's, built with the C compiler of this machine."""

import mmap
import struct
import subprocess
from pathlib import Path

from tests.support.paths import ROOT

SOURCE = ROOT / "tests" / "support" / "shifted_clock.c"


class ShiftedClock:
    """A clock that all processes with its environment share."""

    def __init__(self, directory: Path) -> None:
        """Build the library in `directory`. The clock is right until it is shifted."""
        library, self._shift = directory / "shifted_clock.so", directory / "shift"
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self._shift.write_bytes(struct.pack("<q", 0))
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._shift)}
        """Variables of a process that goes by this clock."""

    def be(self, ahead_s: int) -> None:
        """Set the clock so many seconds ahead of the machine's, or behind it."""
        with self._shift.open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
            memory[:] = struct.pack("<q", ahead_s)
