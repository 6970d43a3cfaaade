"""The protocol that all buffers and stores share, for code that fills them or draws from them.

A buffer is a view of the log, with a position. A buffer filled again to the same position with records in the same
order (the order within a partition is fixed) has the same content and draws. In another order, an unbounded buffer
holds the same records, and a bounded one holds the latest.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item", contravariant=True)
Sample = TypeVar("Sample", covariant=True)


class Buffer(Protocol[Item, Sample]):
    """`add` and `sample` are thread-safe: no sample is torn.

    Random choices are counter-based (`rollstream.consumers.buffers.storage.seeded_draws`), and the counter is saved
    with the content: the same seed, content and call number give the same sample in every process.
    """

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to read, by partition of the topic that fills the buffer; empty if it is filled by hand."""

    def add(self, item: Item, /) -> Any:
        """Add one item. An invalid item raises, and nothing of it is added."""

    def sample(self, count: int, /) -> Sample | None:
        """Draw `count`; None, or an error that the buffer documents, if there is not enough to draw from."""

    def size(self) -> int:
        """Amount that can be drawn, in the buffer's own unit."""

    def stats(self) -> Mapping[str, Any]:
        """Statistics, by name."""

    def save(self, directory: Path, /) -> None:
        """Save content, position, random state and counts, atomically: a kill leaves the earlier state or this one."""

    def load(self, directory: Path, /) -> None:
        """Replace the state by a saved one. Raises StoreError if it is missing or damaged; nothing changes then."""
