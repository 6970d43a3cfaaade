"""Bytes of a policy version: what goes in comes out, and nothing else passes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rollstream.consumers.weights.layout import WeightsRefused, assemble, serialize, split
from rollstream.topics.codec import decode, encode
from rollstream.topics.params_digest import params_digest
from rollstream.topics.records import Chunk, PolicyManifest

DTYPES = [np.dtype(name) for name in ("<f4", ">f4", "<f2", "<i8", "|b1")] + [np.dtype(ml_dtypes.bfloat16)]
arrays = st.dictionaries(
    st.text("abcxyz._0123456789", min_size=1, max_size=12),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4).map(
            lambda shape: np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        )
    ),
    max_size=6,
)


def published(params: dict[str, np.ndarray], chunk_bytes: int) -> tuple[PolicyManifest, list[bytes]]:
    import hashlib

    data, tensors = serialize(params)
    pieces = list(split(data, chunk_bytes))
    chunks = tuple(
        Chunk(index=i, partition=0, offset=i, size_bytes=len(piece), digest=hashlib.sha256(piece).hexdigest())
        for i, piece in enumerate(pieces)
    )
    manifest = PolicyManifest(
        version=3, learner="l", step=3, epoch="e", tensors=tensors, chunks=chunks, digest=params_digest(params)
    )
    return decode(encode(manifest)), pieces


@given(arrays, st.integers(1, 70))
def test_arrays_survive_whatever_their_type_shape_and_chunks(params: dict[str, np.ndarray], chunk_bytes: int) -> None:
    manifest, pieces = published(params, chunk_bytes)
    assert all(len(piece) <= chunk_bytes for piece in pieces)
    found = assemble(manifest, pieces)
    assert found.keys() == params.keys()
    for name, expected in params.items():
        assert found[name].shape == expected.shape
        np.testing.assert_array_equal(found[name], expected)
        assert not found[name].flags.writeable


PARAMS = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.ones(5, "<f4")}


@given(st.integers(0, 43), st.integers(0, 7))
def test_any_bit_changed_is_refused(byte: int, bit: int) -> None:
    manifest, pieces = published(PARAMS, 16)
    index, at = divmod(byte, 16)
    torn = bytearray(pieces[index])
    torn[at] ^= 1 << bit
    pieces[index] = bytes(torn)
    with pytest.raises(WeightsRefused, match=f"chunk {index} of policy version 3"):
        assemble(manifest, pieces)


def test_a_chunk_of_another_version_is_refused() -> None:
    manifest, pieces = published(PARAMS, 16)
    _, others = published({**PARAMS, "a": PARAMS["a"] + 1}, 16)
    with pytest.raises(WeightsRefused):
        assemble(manifest, [others[0], *pieces[1:]])


def test_a_tensor_whose_shape_does_not_fit_its_bytes_is_refused() -> None:
    manifest, pieces = published(PARAMS, 16)
    lying = replace(manifest, tensors=(replace(manifest.tensors[0], shape=(7, 3)), *manifest.tensors[1:]))
    with pytest.raises(WeightsRefused, match="tensor a"):
        assemble(lying, pieces)


def test_a_manifest_whose_whole_digest_is_wrong_is_refused() -> None:
    manifest, pieces = published(PARAMS, 16)
    swapped = (
        replace(manifest.tensors[0], name="b", shape=(6,)),
        replace(manifest.tensors[1], name="a"),
    )
    with pytest.raises(WeightsRefused, match="as a whole"):
        assemble(replace(manifest, tensors=swapped), pieces)


@pytest.mark.parametrize(
    "other",
    [
        {"a": PARAMS["a"], "c": PARAMS["b"]},
        {"a": PARAMS["a"].reshape(3, 2), "b": PARAMS["b"]},
        {"a": PARAMS["a"].view("<i4"), "b": PARAMS["b"]},
        {"a": -PARAMS["a"], "b": PARAMS["b"]},
        {"a": PARAMS["a"]},
    ],
    ids=["name", "shape", "dtype", "sign of zero included", "missing"],
)
def test_the_digest_tells_parameters_apart(other: dict[str, np.ndarray]) -> None:
    assert params_digest(other) != params_digest(PARAMS)


def test_the_digest_does_not_depend_on_order_or_memory_layout() -> None:
    fortran = {"b": PARAMS["b"], "a": np.asfortranarray(PARAMS["a"])}
    assert params_digest(fortran) == params_digest(PARAMS)
    assert params_digest({name: value.astype(">f4") for name, value in PARAMS.items()}) == params_digest(PARAMS)
