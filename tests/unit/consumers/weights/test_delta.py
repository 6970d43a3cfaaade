"""Deltas: applied to the version they were made from, they give the version they lead to, whatever the bits mean."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.content import Content, WeightsRefused
from rollstream.consumers.weights.delta import delta_content
from rollstream.consumers.weights.layout import ContentBuffer, assemble, full_content, split
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.records.arrays import dtype_name, dtype_of, little_endian_view
from rollstream.topics.wire.params_digest import params_digest, tensor_digests

Arrays = dict[str, np.ndarray]
DTYPES = [np.dtype(name) for name in ("<f4", ">f4", "<f2", "<i8", "|b1", "<c16", "<U2", "|S3")]
DTYPES += [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def published(content: Content, params: Arrays, chunk_bytes: int = 50) -> tuple[PolicyManifest, list[bytes]]:
    pieces = list(split(content.views, chunk_bytes))
    chunks = tuple(
        Chunk(index=i, partition=0, offset=i, size_bytes=len(piece), digest="") for i, piece in enumerate(pieces)
    )
    manifest = PolicyManifest(
        version=4, learner="l", step=4, epoch="e", tensors=content.tensors, chunks=chunks, kind="delta", base=3,
        digest=params_digest(params),
    )  # fmt: skip
    return manifest, pieces


def of_bits(dtype: np.dtype[Any], data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    if dtype.kind == "U":
        return np.frombuffer(data, np.uint8).astype("<U2")[: len(data) // dtype.itemsize].reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


@st.composite
def versions(draw: st.DrawFn) -> tuple[Arrays, Arrays]:
    """Arrays of any bits, and the same with some of their elements replaced by others of any bits."""
    before, after = {}, {}
    for name in draw(st.lists(st.text("abc", min_size=1, max_size=3), unique=True, max_size=3)):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (0,), (7,), (5, 4), (2, 3, 4), (60,)]))
        size = int(np.prod(shape))
        data = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
        before[name] = of_bits(dtype, data, shape)
        other = of_bits(dtype, data[::-1], shape).reshape(-1)
        changed = before[name].reshape(-1).copy()
        places = draw(st.lists(st.integers(0, size - 1), max_size=4)) if size else []
        changed[places] = other[places]
        after[name] = changed.reshape(shape)
    return before, after


def bits(arrays: Arrays) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (dtype_name(a.dtype), a.shape, bytes(little_endian_view(a))) for name, a in arrays.items()}


@given(versions(), st.integers(1, 80))
def test_a_delta_gives_every_bit_of_the_version_it_was_made_for(pair: tuple[Arrays, Arrays], chunk_bytes: int) -> None:
    before, after = pair
    untouched = bits(before)
    content = delta_content(before, after, tensor_digests(after))
    if content is None:
        return
    assert content.size_bytes <= sum(array.nbytes for array in after.values()) / 2
    held = {
        name: np.frombuffer(data, dtype_of(dtype)).reshape(shape) for name, (dtype, shape, data) in untouched.items()
    }
    assembled = assemble(*published(content, after, chunk_bytes), held)
    assert bits(assembled) == bits(after)
    assert bits(held) == untouched, "readers may still use the version before"


def test_nan_and_zeros_are_told_apart_by_their_bits() -> None:
    before = np.zeros(400, np.uint16)
    after = before.copy()
    after[[3, 70, 399]] = 0x7FC1, 0x8000, 0xFFFF  # a NaN with a payload, minus zero, another NaN
    old, new = {"w": before.view(BFLOAT16)}, {"w": after.view(BFLOAT16)}
    content = delta_content(old, new, tensor_digests(new))
    assert content is not None
    assert (content.tensors[0].changed, content.size_bytes) == (3, 18)
    manifest, pieces = published(content, new)
    actual = assemble(manifest, pieces, old)["w"]
    assert actual.view(np.uint16).tolist() == after.tolist()
    assert not actual.flags.writeable
    again = delta_content(new, new, tensor_digests(new))
    assert again is not None
    assert (again.tensors[0].changed, again.size_bytes) == (0, 0), "a NaN is no change of itself"


@pytest.mark.parametrize(
    "other",
    [{"v": np.zeros(400)}, {"w": np.zeros((20, 20))}, {"w": np.zeros(400, "<f4")}, {"w": np.arange(1.0, 401.0)}, {}],
    ids=["name", "shape", "dtype", "too many changes", "missing"],
)
def test_versions_that_do_not_resemble_each_other_are_published_in_full(other: Arrays) -> None:
    assert delta_content({"w": np.zeros(400)}, other, tensor_digests(other)) is None


def test_a_tensor_whose_changes_take_more_than_its_bytes_is_given_whole() -> None:
    before = {"large": np.zeros(1000, "<f4"), "small": np.zeros(5, "<f4")}
    after = {"large": before["large"], "small": np.arange(1, 6, dtype="<f4")}
    content = delta_content(before, after, tensor_digests(after))
    assert content is not None
    assert [(t.name, t.changed, t.size_bytes) for t in content.tensors] == [("large", 0, 0), ("small", -1, 20)]
    assert bits(assemble(*published(content, after), before)) == bits(after)


BEFORE = {"w": np.arange(100, dtype="<f4")}
AFTER = {"w": np.where(np.arange(100) % 20 == 7, -1, BEFORE["w"]).astype("<f4")}


def delta() -> tuple[PolicyManifest, list[bytes]]:
    content = delta_content(BEFORE, AFTER, tensor_digests(AFTER))
    assert content is not None
    return published(content, AFTER)


@given(st.integers(0, 39), st.integers(0, 7))
def test_a_delta_with_a_bit_changed_is_refused(byte: int, bit: int) -> None:
    manifest, pieces = delta()
    torn = bytearray(pieces[0])
    torn[byte] ^= 1 << bit
    with pytest.raises(WeightsRefused, match="tensor w of policy version 4"):
        assemble(manifest, [bytes(torn)], BEFORE)


@pytest.mark.parametrize(
    ("base", "why"),
    [
        ({}, "is a delta on version 3, which is missing"),
        ({"w": BEFORE["w"].reshape(10, 10)}, "has another shape or dtype than in version 3"),
        ({"w": BEFORE["w"].astype("<f8")}, "has another shape or dtype than in version 3"),
        ({"w": BEFORE["w"] + 1}, "differs from its manifest"),
    ],
)
def test_a_delta_is_refused_on_any_other_base(base: Arrays, why: str) -> None:
    with pytest.raises(WeightsRefused, match=why):
        assemble(*delta(), base)


def test_a_delta_with_fewer_bytes_than_changes_is_refused() -> None:
    manifest, pieces = delta()
    lying = replace(manifest, tensors=(replace(manifest.tensors[0], changed=4),))
    with pytest.raises(WeightsRefused, match="has too many or too few bytes for its changes"):
        assemble(lying, pieces, BEFORE)


def test_a_delta_that_names_an_element_twice_is_refused_although_its_last_value_is_right() -> None:
    manifest, pieces = delta()
    size, count = len(pieces[0]) // 2, manifest.tensors[0].changed
    gaps = np.frombuffer(pieces[0][:size], np.uint8).reshape(4, count).T.copy().view("<i4").reshape(-1)
    assert np.cumsum(gaps).tolist() == [7, 27, 47, 67, 87]
    doubled = np.append(gaps, 0).astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()
    values = np.frombuffer(pieces[0][size:], np.uint8).reshape(4, count)
    piece = doubled + np.hstack([values, values[:, -1:]]).tobytes()
    lying = replace(manifest, tensors=(replace(manifest.tensors[0], changed=count + 1, size_bytes=len(piece)),))
    lying = replace(lying, chunks=(replace(manifest.chunks[0], size_bytes=len(piece)),))
    with pytest.raises(WeightsRefused, match="has changes outside its elements"):
        assemble(lying, [piece], BEFORE)


def test_tensors_that_never_change_do_not_keep_the_memory_of_the_full_version() -> None:
    memory, rng = ReusedMemory(), np.random.default_rng(0)
    full = {"a": rng.integers(0, 9, 2**21, "<i8"), "frozen": np.arange(2**17), "norm": np.ones(9, "<f4")}
    content = full_content(full, tensor_digests(full))
    manifest, pieces = published(content, full, chunk_bytes=2**22)
    buffer = ContentBuffer(replace(manifest, kind="full", base=-1), memory=memory)
    for chunk, piece in zip(manifest.chunks, pieces, strict=True):
        buffer.put(chunk, piece)
    held = buffer.arrays()
    del buffer
    for number in range(3):
        after = {**held, "a": held["a"].copy()}
        after["a"][number] += 1
        delta = delta_content(held, after, tensor_digests(after))
        assert delta is not None
        manifest, pieces = published(delta, after, chunk_bytes=2**22)
        buffer = ContentBuffer(manifest, memory=memory)
        for chunk, piece in zip(manifest.chunks, pieces, strict=True):
            buffer.put(chunk, piece)
        before, held = held, buffer.arrays(held)
        del buffer
        assert (held["frozen"] is before["frozen"], held["norm"] is before["norm"]) == (number > 0, number > 0)
        assert all(np.array_equal(held[name], after[name]) for name in after)
        del before, after
        assert memory.free_bytes >= 2**24, "the version before is free"
