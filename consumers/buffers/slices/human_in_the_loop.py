"""A slice buffer of two sides, one for the policy's episodes and one for human episodes; samples take half from each.

The control mode of the first step decides the side of an episode. So human episodes are half of each
sample even if they are few, and policy episodes do not displace them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer, NothingToDraw
from rollstream.consumers.buffers.slices.episode_cuts import AUTO, CONTROL_MODE, HUMAN, EpisodePart
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.wire.trajectory_arrays import flatten, nest

_SIDES = {AUTO: "auto", HUMAN: "hil"}
_OTHER_SEED = 2**64


def open_episode_buffer(
    directory: str | Path, *, use_hil_buffer: bool = False, **options: Any
) -> "EpisodeSliceBuffer | HilEpisodeBuffer":
    """Open one buffer for all episodes, or one with two sides; `options` are those of EpisodeSliceBuffer."""
    return (HilEpisodeBuffer if use_hil_buffer else EpisodeSliceBuffer)(directory, **options)


class HilEpisodeBuffer(EpisodeSliceBuffer):
    """A slice buffer of two sides, each with the full capacity. A record is added to both sides at once.

    Adding reads the control mode of an episode's first step from the span, or else from the array `control_mode`
    [T, ...]. It also raises RecordError if neither exists, or the mode is neither 0 nor 1. A sample has one slice
    fewer if an odd number is requested; the first half of its slices is from the policy, the second half from humans.
    NothingToDraw names the side that has no episode that is long enough.
    """

    _SIDES = 2

    @property
    def auto(self) -> EpisodeSliceBuffer:
        """Episodes that began with control mode 0."""
        return _Side(self, AUTO)

    @property
    def hil(self) -> EpisodeSliceBuffer:
        """Episodes that began with control mode 1."""
        return _Side(self, HUMAN)

    def draw(self, count: int, length: int) -> dict[str, Any]:
        """Like `sample`, for slices of any length."""
        if count < 2:
            raise ConfigurationError(f"a sample of {count} slices, half from each side; draw at least 2")
        with self._lock:
            self.check_drawable(length)
            auto, human = (flatten(side.draw(count // 2, length)) for side in (self.auto, self.hil))
            return nest({path: np.concatenate([leaf, human[path]]) for path, leaf in auto.items()})

    def check_drawable(self, length: int) -> None:
        """Raise NothingToDraw, naming the side, if a side has no episode long enough for a slice of `length` steps."""
        for mode, side in ((AUTO, self.auto), (HUMAN, self.hil)):
            try:
                side.check_drawable(length)
            except NothingToDraw as error:
                raise NothingToDraw(f"the {_SIDES[mode]} side ({CONTROL_MODE} {mode}): {error}") from error

    def size(self) -> int:
        """Number of steps held on both sides together."""
        with self._lock:
            return self.auto.size() + self.hil.size()

    def stats(self) -> dict[str, Any]:
        """Return the number of steps held on both sides, and the statistics of each side by name."""
        with self._lock:
            return {"size": self.size(), _SIDES[AUTO]: self.auto.stats(), _SIDES[HUMAN]: self.hil.stats()}

    def is_open(self, episode: str) -> bool:
        """Whether the episode of this uid is open on a side and has steps there."""
        return self.auto.is_open(episode) or self.hil.is_open(episode)

    def _routed(self, parts: Sequence[EpisodePart]) -> list[Sequence[EpisodePart]]:
        """Return the parts of each side. A continued episode stays on the side where it began. Raises RecordError."""
        sides: tuple[list[EpisodePart], list[EpisodePart]] = ([], [])
        first_modes: dict[str, int] = {}
        for part in parts:
            mode = part.control_mode
            if not part.first and part.uid:
                began = [side for side, state in enumerate(self._store.state.sides) if part.uid in state.open]
                mode = first_modes.get(part.uid, began[0] if began else mode)
            if mode not in _SIDES:
                problem = f"it has no {CONTROL_MODE}" if mode is None else f"its {CONTROL_MODE} is {mode}"
                raise RecordError(
                    f"an episode of {part.steps} steps: {problem}; it must be 0 (the policy) or 1 (a human) at the "
                    "first step"
                )
            if part.uid:
                first_modes[part.uid] = mode
            sides[mode].append(part)
        return [*sides]


class _Side(EpisodeSliceBuffer):
    """One side of a buffer of two, with the same store and lock."""

    def __init__(self, both: HilEpisodeBuffer, side: int) -> None:
        self.__dict__.update(vars(both))
        self._side = side
        self._seed += side * _OTHER_SEED
