"""Warns of roles that exit again and again while the rest of the run goes on. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CrashLoop:
    """The last exit of a role that exits again and again."""

    exits: int
    """Exits within the window."""
    cause: str
    """How it exited, and its last error or the end of its log."""
    again_in_s: float
    """Pause until it is started again; infinite if another process has its place, so that it is not."""

    @property
    def is_final(self) -> bool:
        """Whether the role is not started again."""
        return self.again_in_s == math.inf


class LoopWatch:
    """Compares the crash loops with those that it already reported."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._told: dict[str, CrashLoop] = {}

    def look(self, loops: Mapping[str, CrashLoop]) -> list[str]:
        """Return a warning for each role that began to loop or exited for another reason, and a line for each that
        recovered."""
        lines = []
        for name, loop in loops.items():
            before = self._told.get(name)
            if before is None or before.cause != loop.cause:
                again = "not started again" if loop.is_final else f"started again in {loop.again_in_s:.0f} s"
                lines.append(
                    f"warning: role {name} {loop.cause}; run {self._run} continues without this role, which is {again}"
                )
        lines += [f"role {name} has recovered" for name in self._told if name not in loops]
        self._told = dict(loops)
        return lines
