"""Options of slice buffers, which EpisodeSliceBuffer and HilEpisodeBuffer share."""

from typing import TypedDict

from rollstream.consumers.buffers.slices.episode_cuts import Boundaries

CAPACITY = 10_000_000
"""Default number of steps of a ring."""
SLICE_LEN = 80
"""Default number of steps of a slice."""


class SliceOptions(TypedDict, total=False):
    """Optional arguments of a slice buffer, apart from its capacity and the length of slices."""

    num_slices: int | None
    strict_length: bool
    pad_output: bool
    seed: int
    boundaries: Boundaries | None
    truncated_key: str
    read_only: bool


class SizedSliceOptions(SliceOptions, total=False):
    """All optional arguments of a slice buffer."""

    capacity: int
    slice_len: int | None


class EpisodeOptions(TypedDict, total=False):
    """The open episode that an added tree continues or begins, and whether it ends there."""

    episode: str
    last: bool
