"""Merkle trees against the recursive definition of RFC 6962, and paths that prove one entry and nothing else."""

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.audit.attestation.trees import EMPTY, MerkleTree, leaf_hash, node_hash, root_of_path

ENTRIES = st.lists(st.binary(max_size=6), max_size=70)


def root_by_definition(entries: list[bytes]) -> bytes:
    """Section 2.1 of the RFC, word for word."""
    if not entries:
        return blake3(b"").digest()
    if len(entries) == 1:
        return blake3(b"\x00" + entries[0]).digest()
    split = 1
    while 2 * split < len(entries):
        split *= 2
    halves = root_by_definition(entries[:split]) + root_by_definition(entries[split:])
    return blake3(b"\x01" + halves).digest()


@given(ENTRIES)
def test_a_root_is_that_of_the_definition(entries: list[bytes]) -> None:
    assert MerkleTree(entries).root() == root_by_definition(entries)


@given(ENTRIES.filter(bool), st.data())
def test_a_path_proves_its_entry_at_its_place_and_no_other(entries: list[bytes], data: st.DataObject) -> None:
    tree = MerkleTree(entries)
    index = data.draw(st.integers(0, len(entries) - 1))
    path = tree.path(index)
    assert len(path) <= (len(entries) - 1).bit_length()
    assert root_of_path(entries[index], index, len(entries), path) == tree.root()

    assert root_of_path(entries[index] + b"x", index, len(entries), path) != tree.root()
    other = data.draw(st.integers(-1, len(entries)))
    if other != index and not (0 <= other < len(entries) and entries[other] == entries[index]):
        assert root_of_path(entries[index], other, len(entries), path) != tree.root()
    assert root_of_path(entries[index], index, len(entries), [*path, EMPTY]) is None
    if path:
        assert root_of_path(entries[index], index, len(entries), path[:-1]) is None
        at = data.draw(st.integers(0, len(path) - 1))
        assert root_of_path(entries[index], index, len(entries), [*path[:at], EMPTY, *path[at + 1 :]]) != tree.root()


@given(ENTRIES, st.data())
def test_any_change_of_the_list_changes_the_root(entries: list[bytes], data: st.DataObject) -> None:
    changed = data.draw(ENTRIES.filter(lambda other: other != entries))
    assert MerkleTree(entries).root() != MerkleTree(changed).root()


def test_a_node_passes_for_no_leaf() -> None:
    tree = MerkleTree([b"a", b"b"])
    assert MerkleTree([leaf_hash(b"a") + leaf_hash(b"b")]).root() != tree.root()
    assert tree.root() == node_hash(leaf_hash(b"a"), leaf_hash(b"b"))


def test_an_entry_that_is_not_there_has_no_path() -> None:
    with pytest.raises(IndexError, match="has 0 entries, none at 0"):
        MerkleTree().path(0)
    assert root_of_path(b"a", 0, 0, []) is None
