"""Digests of parameters: a tree over shards and tensors, and the rule of earlier releases for what is on record."""

import hashlib

import numpy as np
import pytest

from rollstream.topics import params_digest as module
from rollstream.topics.params_digest import (
    SHARD_BYTES,
    digest_as,
    params_digest,
    tensor_digests,
    tree_digest,
    whole_digest,
)

PARAMS = {"b": np.arange(6, dtype="<f4").reshape(2, 3), "a": np.float32(1.5)}


def test_the_digest_is_a_hash_over_names_dtypes_shapes_and_the_digests_of_tensors() -> None:
    rows = "".join(
        f"{name}\0<f4\0{shape}\0{hashlib.sha256(PARAMS[name].tobytes()).hexdigest()}\0"
        for name, shape in (("a", "[]"), ("b", "[2, 3]"))
    )
    assert params_digest(PARAMS) == hashlib.sha256(rows.encode()).hexdigest() + ".tree"
    assert tree_digest(reversed(tensor_digests(PARAMS))) == params_digest(PARAMS)


def test_the_digest_of_a_large_tensor_is_over_those_of_its_shards() -> None:
    large = np.arange(SHARD_BYTES + 3, dtype=np.uint8)
    shards = (large[:SHARD_BYTES], large[SHARD_BYTES:])
    expected = hashlib.sha256(b"".join(hashlib.sha256(shard.tobytes()).digest() for shard in shards)).hexdigest()
    digests = tensor_digests({"small": np.zeros(3), "large": large})
    assert [tensor.name for tensor in digests] == ["large", "small"]
    assert digests[0].digest == expected
    assert digests[1].digest == hashlib.sha256(bytes(24)).hexdigest()


def test_digests_on_record_are_compared_by_the_rule_they_were_made_with() -> None:
    """The digest is the one that earlier releases put on record for these parameters."""
    recorded = "e9074f6063bfb75405985153192eba54300521b48c6b221f8aabe76a4c912b54"
    assert whole_digest(PARAMS) == recorded
    assert digest_as(recorded, PARAMS) == recorded
    for other in ("", "checkpoint-2", params_digest(PARAMS)):
        assert digest_as(other, PARAMS) == params_digest(PARAMS)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "|b1", "<c8", "<M8[s]", "<U3", "|S2"])
def test_arrays_of_every_kind_have_a_digest_whatever_their_layout(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    assert params_digest({"a": array}) == params_digest({"a": np.asfortranarray(array)})
    assert params_digest({"a": array}) != params_digest({"a": array.T})
    assert params_digest({"a": array[:0]}) != params_digest({"a": array[:, :0]})
    assert module.TREE in params_digest({})
