"""The records of a slice buffer's journal: changes of its ring."""

from collections.abc import Mapping

import msgspec


class EpisodeSteps(msgspec.Struct, array_like=True, frozen=True):
    """The next `steps` steps of the ring belong to an episode."""

    episode: int
    steps: int
    uid: str = ""
    """Uid of an episode that is or was open; empty if the episode begins and ends here."""
    last: bool = True
    """Whether the episode ends. If so, no episode stays open under its uid; if not, this episode is open."""
    begin: int = 0
    """Number of steps of the episode before these, needed if the episode is new; 0 if it is unknown."""


class AddRecord(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    """Steps were written at the head, and the position of a partition moved with them."""

    runs: tuple[EpisodeSteps, ...]
    at: tuple[int, int] | None
    """Partition and offset of the record that the steps came from."""
    draws: int


class ReserveRecord(msgspec.Struct, array_like=True, frozen=True, tag="r"):
    """Steps below counter `stop` may now overwrite the steps whose counters are lower by the capacity."""

    stop: int


class ReserveOnDiskRecord(msgspec.Struct, array_like=True, frozen=True, tag="s"):
    """Like ReserveRecord, but on disk before any step below `stop` is written, in case the machine crashes."""

    stop: int


class FlushRecord(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """All earlier records and steps are on disk."""

    draws: int


class OpenRecord(msgspec.Struct, array_like=True, frozen=True, tag="o"):
    """A writer opened the journal during this boot of the machine."""

    boot: str


class SnapshotRecord(msgspec.Struct, array_like=True, frozen=True, tag="w"):
    """The whole state, which replaces all earlier records; it is on disk."""

    columns: Mapping[str, bytes]
    """Columns of the episode index; int64, little-endian."""
    open: Mapping[str, int]
    position: Mapping[int, int]
    head: int
    low: int
    following: int
    draws: int
    taken: Mapping[int, tuple[str, ...]]


Record = AddRecord | ReserveRecord | ReserveOnDiskRecord | FlushRecord | OpenRecord | SnapshotRecord
DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
