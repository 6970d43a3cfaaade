"""Warns of roles that exit again and again while the rest of the run goes on. Pure."""

from collections.abc import Mapping

from rollstream.pipeline.run.supervisor import CrashLoop


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
                lines.append(
                    f"warning: role {name} {loop.cause}; run {self._run} continues without this role, which is started "
                    f"again in {loop.again_in_s:.0f} s"
                )
        lines += [f"role {name} has recovered" for name in self._told if name not in loops]
        self._told = dict(loops)
        return lines
