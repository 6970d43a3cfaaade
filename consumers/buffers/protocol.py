"""The protocol of the replay buffers, for code that fills them or draws from them. Stores of groups have parts of it.

A buffer is a view of the log, with a position. Two buffers that are filled to the same position with records in the
same order have the same content and draws; the order within one partition is fixed. If the order differs, unbounded
buffers have the same records, and each bounded buffer has the records that were added to it last.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item", contravariant=True)
Sample = TypeVar("Sample", covariant=True)


class Buffer(Protocol[Item, Sample]):
    """`add` and `sample` are thread-safe: no sample contains a partly added item.

    Random choices are counter-based (`rollstream.consumers.buffers.storage.seeded_draws`), and the counter is saved
    with the content: the same seed, content and call number give the same sample in every process.
    """

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to read, by partition of the topic that fills the buffer; empty if it is filled by hand."""

    def add(self, item: Item, /) -> Any:
        """Add one item. Raises an error if the item is invalid; no part of it is added then."""

    def sample(self, count: int, /) -> Sample | None:
        """Draw `count` items; return None, or raise the error that the buffer documents, if it has too few."""

    def size(self) -> int:
        """Size of the content, in the unit of the buffer."""

    def stats(self) -> Mapping[str, Any]:
        """Statistics, by name."""

    def save(self, directory: Path, /) -> None:
        """Save content, position, random state and counts, atomically: a kill leaves the earlier or the new state."""

    def load(self, directory: Path, /) -> None:
        """Replace the state by a saved state. If that is missing or damaged, raise StoreError and change nothing."""
