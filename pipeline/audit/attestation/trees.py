"""The trees of a statement: Merkle trees as in RFC 6962, over BLAKE3, and their entries as canonical JSON.

Any program that has the records can compute the same entries.

Leaves and nodes are hashed with different prefixes, so that a node cannot be mistaken for a leaf.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

from blake3 import blake3

from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import BatchUse, LearnerStep, PolicyManifest, TrainingBatch

TreeName = Literal["rollouts", "batches", "steps", "versions"]
TREES: tuple[TreeName, ...] = get_args(TreeName)
Leaf = dict[str, Any]


def canonical(value: Any) -> bytes:
    """Encode plain values as JSON in the one form that is hashed and signed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(data: bytes | None) -> str:
    """Return the BLAKE3 digest of some bytes, in hexadecimal; None counts as no bytes."""
    return blake3(data or b"").hexdigest()


def rollout_leaf(message: KafkaRecord, uid: str, fate: str, batch: str, row: int) -> Leaf:
    """Return the entry of a record of `rollouts`.

    `uid` is empty if the record is not a rollout, and `batch` is empty if no batch has it.
    """
    return {
        "partition": message.partition,
        "offset": message.offset,
        "time_ms": message.timestamp_ms,
        "key": digest_of(message.key),
        "value": digest_of(message.value),
        "uid": uid,
        "fate": fate,
        "batch": batch,
        "row": row,
    }


def batch_leaf(batch: TrainingBatch, digest: str, index_offset: int) -> Leaf:
    """Return the entry of a batch."""
    return {"batch": batch.batch_id, "rows": len(batch), "digest": digest, "index_offset": index_offset}


def step_leaf(step: LearnerStep) -> Leaf:
    """Return the entry of a step."""
    return {
        "learner": step.learner,
        "step": step.step,
        "position": step.position,
        "policy_version": step.policy_version,
        "params_digest": step.params_digest,
        "uses": [_use(use) for use in step.uses],
    }


def _use(use: BatchUse) -> Leaf:
    rows = list(use.row_numbers)
    return {"batch": use.batch_id, "rows": use.rows, "row_numbers": rows, "use": use.use, "again": use.again}


def version_leaf(manifest: PolicyManifest) -> Leaf:
    """Return the entry of a policy version."""
    return {
        "version": manifest.version,
        "learner": manifest.learner,
        "step": manifest.step,
        "digest": manifest.digest,
        "params_digest": manifest.params_digest,
        "model": digest_of(manifest.model.encode()),
    }


def uses_of_row(step: Leaf, batch: str, row: int) -> Iterator[Leaf]:
    """Yield the uses, in the entry of a step, that include a row of a batch."""
    for use in step["uses"]:
        if use["batch"] == batch and (row in use["row_numbers"] if use["row_numbers"] else row < use["rows"]):
            yield use


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
