"""Merkle trees as in RFC 6962, over BLAKE3: a root commits to a list, and a short path proves one entry of it.

Leaves and nodes are hashed with different prefixes, so that a node cannot be mistaken for a leaf.
"""

from collections.abc import Iterable, Iterator, Sequence

from blake3 import blake3

DIGEST_BYTES = 32
EMPTY = blake3().digest()
"""Root of the tree without leaves."""
_LEAF, _NODE = b"\x00", b"\x01"


def leaf_hash(content: bytes) -> bytes:
    """Return the hash of one entry."""
    return blake3(_LEAF + content).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of a node with two neighbours as its children."""
    return blake3(_NODE + left + right).digest()


class MerkleTree:
    """A list of entries, kept as 32 bytes for each."""

    def __init__(self, entries: Iterable[bytes] = ()) -> None:
        self._leaves = bytearray()
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return len(self._leaves) // DIGEST_BYTES

    def add(self, content: bytes) -> None:
        """Append an entry."""
        self._leaves += leaf_hash(content)

    def root(self) -> bytes:
        """Return the hash that commits to all entries, in their order."""
        *_, level = self._levels()
        return level[0] if level else EMPTY

    def path(self, index: int) -> list[bytes]:
        """Return the hashes that lead from an entry to the root. Raises IndexError if there is no such entry."""
        if not 0 <= index < len(self):
            raise IndexError(f"the tree has {len(self)} entries, none at {index}")
        hashes = []
        for level in self._levels():
            if (neighbour := index ^ 1) < len(level):
                hashes.append(level[neighbour])
            index //= 2
        return hashes

    def _levels(self) -> Iterator[list[bytes]]:
        """Yield the hashes of each level, leaves first. A last node without a neighbour moves up unchanged, which gives
        the same tree as the RFC's split at the largest power of two."""
        leaves = self._leaves
        level = [bytes(leaves[at : at + DIGEST_BYTES]) for at in range(0, len(leaves), DIGEST_BYTES)]
        yield level
        while len(level) > 1:
            pairs = [node_hash(*level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
            level = pairs + level[2 * len(pairs) :]
            yield level


def root_of_path(content: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """Return the root that a path gives for an entry in a tree of `size` entries (RFC 9162, section 2.1.3.2).

    Returns None if the path cannot have this length in such a tree, or if there is no such entry.
    """
    if not 0 <= index < size:
        return None
    node, last, rest = leaf_hash(content), size - 1, iter(path)
    while last:
        if index & 1 or index < last:
            neighbour = next(rest, None)
            if neighbour is None:
                return None
            node = node_hash(neighbour, node) if index & 1 else node_hash(node, neighbour)
        index, last = index // 2, last // 2
    return node if next(rest, None) is None else None
