"""Digests of parameters: a tree over tensors."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.wire import params_digest as module
from rollstream.topics.wire.params_digest import (
    FACTORS,
    LARGE_BYTES,
    OFFSETS,
    params_checksum,
    params_digest,
    tensor_checksum,
    tensor_digests,
    tree_digest,
)

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


DTYPES = [np.float32, np.float64, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def in_plain_integers(data: bytes, size: int) -> tuple[int, ...]:
    """The rule in Python's own integers, over words of `size` bytes."""

    def mixed(word: int) -> int:
        word ^= word >> 16
        word = word * 0x7FEB352D % 2**32
        word ^= word >> 15
        word = word * 0x846CA68B % 2**32
        return word ^ word >> 16

    words = [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]
    return tuple(
        sum(mixed(word * factor % 2**32 ^ (mixed(place) + offset) % 2**32) for place, word in enumerate(words)) % 2**32
        for factor, offset in zip(FACTORS, OFFSETS, strict=True)
    )


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4]))
def test_it_is_the_stated_sum_whatever_the_size_of_a_word(data: bytes, size: int) -> None:
    data = data[: len(data) // size * size]
    assert tensor_checksum(np.frombuffer(data, f"<u{size}")) == in_plain_integers(data, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_changes_every_sum(dtype: Any) -> None:
    random = np.random.default_rng(3)
    array = random.standard_normal((5, 7)).astype(dtype)
    before = tensor_checksum(array)
    for _ in range(50):
        changed = array.copy()
        raw = changed.reshape(-1).view(np.uint8)
        raw[random.integers(len(raw))] ^= np.uint8(1 << random.integers(8))
        after = tensor_checksum(changed)
        assert all(one != other for one, other in zip(before, after, strict=True))


def test_it_does_not_depend_on_how_memory_is_laid_out_and_does_on_the_order_of_values() -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    assert tensor_checksum(np.asfortranarray(array)) == tensor_checksum(array.astype(">f4")) == tensor_checksum(array)
    assert tensor_checksum(array[::-1]) != tensor_checksum(array)


def test_more_words_than_are_summed_at_once_have_the_sum_of_their_parts() -> None:
    array = np.random.default_rng(1).integers(0, 2**32, (1 << 18) + 5, dtype=np.uint32)
    first = np.array(tensor_checksum(array[: 1 << 18]), np.uint64)
    rest = in_plain_integers(bytes(4 * (1 << 18)) + array[1 << 18 :].tobytes(), 4)
    zeros = np.array(tensor_checksum(np.zeros(1 << 18, np.uint32)), np.uint64)
    assert tuple((first + np.array(rest, np.uint64) - zeros) % 2**32) == tensor_checksum(array)


def test_names_dtypes_and_shapes_count() -> None:
    array = np.zeros((2, 3), "<f4")
    digests = {
        params_checksum({"a": array}),
        params_checksum({"b": array}),
        params_checksum({"a": array.reshape(3, 2)}),
        params_checksum({"a": array.view("<i4")}),
        params_checksum({"a": array, "b": array[:0]}),
        params_checksum({}),
    }
    assert len(digests) == 6


def test_a_digest_on_record_stays_what_it_is() -> None:
    """Steps are compared with records that another process made."""
    params = {"w": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.array([1.0, -0.0], ml_dtypes.bfloat16)}
    assert params_checksum(params) == "a1d91fc18cc5f08e1e3ff54d28db6eeb7730e63d57994400ee6611e6d4a6bb94.checksum"
