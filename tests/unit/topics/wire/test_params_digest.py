"""Digests of parameters: a tree over tensors."""

import numpy as np
import pytest
from blake3 import blake3

from rollstream.topics.wire import params_digest as module
from rollstream.topics.wire.params_digest import LARGE_BYTES, params_digest, tensor_digests, tree_digest

PARAMS = {"b": np.arange(6, dtype="<f4").reshape(2, 3), "a": np.float32(1.5)}


def test_the_digest_is_a_hash_over_names_dtypes_shapes_and_the_digests_of_tensors() -> None:
    rows = "".join(
        f"{name}\0<f4\0{shape}\0{blake3(PARAMS[name].tobytes()).hexdigest()}\0"
        for name, shape in (("a", "[]"), ("b", "[2, 3]"))
    )
    assert params_digest(PARAMS) == blake3(rows.encode()).hexdigest() + ".tree"
    assert tree_digest(reversed(tensor_digests(PARAMS))) == params_digest(PARAMS)


def test_large_parameters_have_digests_in_name_order_too() -> None:
    large = np.arange(LARGE_BYTES + 3, dtype=np.uint8)
    digests = tensor_digests({"small": np.zeros(3), "large": large})
    assert [tensor.name for tensor in digests] == ["large", "small"]
    assert [tensor.digest for tensor in digests] == [blake3(data).hexdigest() for data in (large.data, bytes(24))]


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "|b1", "<c8", "<M8[s]", "<U3", "|S2"])
def test_arrays_of_every_kind_have_a_digest_whatever_their_layout(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    assert params_digest({"a": array}) == params_digest({"a": np.asfortranarray(array)})
    assert params_digest({"a": array}) != params_digest({"a": array.T})
    assert params_digest({"a": array[:0]}) != params_digest({"a": array[:, :0]})
    assert module.TREE in params_digest({})
