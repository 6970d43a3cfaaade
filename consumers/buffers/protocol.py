"""What every buffer and store offers to whoever fills it and whoever draws from it, in a run or in a notebook.

A buffer is a view of the log: it knows the position it has been filled to. Filled again to the same position, with its
records in the same order (those of one partition always are), it holds and draws the same. In another order it holds
the same where it has room for everything, and what came last where it has not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

Added = TypeVar("Added", contravariant=True)
Sampled = TypeVar("Sampled", covariant=True)


class Buffer(Protocol[Added, Sampled]):
    """Add and sample may be called from several threads: no sample is torn.

    Random choices are counter-based (`consumers.buffers.draws`), and the counter is part of what is saved: the same
    seed, content and call number give the same sample, in whichever process and whatever was drawn before.
    """

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to be read, by partition of the topic that fills the buffer; empty where it is filled by hand."""

    def add(self, item: Added, /) -> Any:
        """Put one item in. What is wrong with it raises, and then none of it is in."""

    def sample(self, count: int, /) -> Sampled | None:
        """Draw `count`; None, or an error that the buffer documents, where there is not enough to draw from."""

    def size(self) -> int:
        """How much can be drawn, in the buffer's own unit."""

    def stats(self) -> Mapping[str, Any]:
        """Figures, by name."""

    def save(self, directory: Path, /) -> None:
        """Keep content, position, random state and counts, atomically: who is killed leaves the one before or this."""

    def load(self, directory: Path, /) -> None:
        """Become what was saved. Raises StoreError where nothing whole is there, and is then as it was before."""
