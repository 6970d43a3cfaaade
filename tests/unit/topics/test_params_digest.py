"""Digests of parameters: a tree over shards and tensors."""

import hashlib

import numpy as np
import pytest

from rollstream.topics import params_digest as module
from rollstream.topics.params_digest import (
    SHARD_BYTES,
    params_digest,
    tensor_digests,
    tree_digest,
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


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "|b1", "<c8", "<M8[s]", "<U3", "|S2"])
def test_arrays_of_every_kind_have_a_digest_whatever_their_layout(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    assert params_digest({"a": array}) == params_digest({"a": np.asfortranarray(array)})
    assert params_digest({"a": array}) != params_digest({"a": array.T})
    assert params_digest({"a": array[:0]}) != params_digest({"a": array[:, :0]})
    assert module.TREE in params_digest({})
