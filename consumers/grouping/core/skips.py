"""Offsets that a fold leaves out unread, at or above its position."""

from collections.abc import Mapping

from rollstream.consumers.grouping.core.effects import OffsetSkip


class Skips:
    """Offsets to leave out, with their reasons. The mapping may grow while the fold runs."""

    def __init__(self, skips: Mapping[int, OffsetSkip]) -> None:
        self._skips = skips

    def __bool__(self) -> bool:
        return bool(self._skips)

    def __contains__(self, offset: int) -> bool:
        return offset in self._skips

    def __getitem__(self, offset: int) -> OffsetSkip:
        return self._skips[offset]

    def is_hopped(self, offset: int) -> bool:
        """Whether an offset is left out without reading its record, so that even its append time does not count."""
        skip = self._skips.get(offset)
        return skip is not None and not skip.timed

    def hopped_from(self, position: int) -> list[int]:
        """Return the offsets at or above `position` that are left out without reading their records."""
        return sorted(offset for offset in self._skips if offset >= position and self.is_hopped(offset))
