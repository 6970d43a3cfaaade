"""Bytes of a policy version are read as they were written, and any other bytes are refused."""

import contextlib
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rollstream.consumers.weights.content import WeightsRefused, compress
from rollstream.consumers.weights.layout import ContentBuffer, assemble, full_content, split
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.params_digest import TensorDigest, params_digest, tensor_digests, tree_digest

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


def published(params: dict[str, np.ndarray], chunk_bytes: int, codec: str = "") -> tuple[PolicyManifest, list[bytes]]:
    content = full_content(params, tensor_digests(params))
    pieces = list(split(content.views, chunk_bytes))
    stored = [compress(piece) if codec else piece for piece in pieces]
    chunks = tuple(
        Chunk(
            index=i, partition=0, offset=i, size_bytes=len(stored[i]), digest="", codec=codec, content_bytes=len(piece)
        )
        for i, piece in enumerate(pieces)
    )
    manifest = PolicyManifest(
        version=3, learner="l", step=3, epoch="e", tensors=content.tensors, chunks=chunks, digest=params_digest(params)
    )
    return decode(encode(manifest)), stored


@given(arrays, st.integers(1, 70), st.sampled_from(["", "zstd"]))
def test_arrays_survive_whatever_their_type_shape_and_chunks(
    params: dict[str, np.ndarray], chunk_bytes: int, codec: str
) -> None:
    manifest, pieces = published(params, chunk_bytes, codec)
    assert all(chunk.content_bytes <= chunk_bytes for chunk in manifest.chunks)
    assembled = assemble(manifest, pieces)
    assert assembled.keys() == params.keys()
    for name, expected in params.items():
        assert assembled[name].shape == expected.shape
        np.testing.assert_array_equal(assembled[name], expected)
        assert not assembled[name].flags.writeable


PARAMS = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.ones(5, "<f4")}


@given(st.integers(0, 43), st.integers(0, 7))
def test_any_bit_changed_is_refused_and_the_tensor_is_named(byte: int, bit: int) -> None:
    manifest, pieces = published(PARAMS, 16)
    with pytest.raises(WeightsRefused, match=f"tensor {'a' if byte < 24 else 'b'} of policy version 3"):
        assemble(manifest, flipped(pieces, *divmod(byte, 16), bit))


@given(st.data(), st.integers(0, 7))
def test_any_bit_changed_in_compressed_chunks_is_refused_or_changes_nothing(data: st.DataObject, bit: int) -> None:
    manifest, pieces = published(PARAMS, 16, "zstd")
    index = data.draw(st.integers(0, len(pieces) - 1))
    torn = flipped(pieces, index, data.draw(st.integers(0, len(pieces[index]) - 1)), bit)
    # Some bits of a frame's header do not matter to a reader that knows the size.
    with contextlib.suppress(WeightsRefused):
        assert params_digest(assemble(manifest, torn)) == manifest.digest


def test_a_chunk_that_is_no_zstd_is_named_with_its_size_once() -> None:
    manifest, pieces = published(PARAMS, 16, "zstd")
    with pytest.raises(WeightsRefused, match="differs from its manifest: ") as refused:
        assemble(manifest, [bytes(len(pieces[0])), *pieces[1:]])
    assert str(refused.value).count(f"{len(pieces[0])} bytes") == 1


def flipped(pieces: list[bytes], index: int, byte: int, bit: int) -> list[bytes]:
    torn = bytearray(pieces[index])
    torn[byte] ^= 1 << bit
    return [*pieces[:index], bytes(torn), *pieces[index + 1 :]]


@pytest.mark.parametrize("lie", [{"content_bytes": 15}, {"content_bytes": 17}, {"codec": "lz5"}])
def test_chunks_whose_content_is_not_what_the_manifest_says_are_refused(lie: dict[str, Any]) -> None:
    manifest, pieces = published(PARAMS, 16, "zstd")
    lying = replace(manifest, chunks=(replace(manifest.chunks[0], **lie), *manifest.chunks[1:]))
    with pytest.raises(WeightsRefused, match="policy version 3"):
        assemble(lying, pieces)


def test_chunks_are_cut_without_a_copy_of_the_whole() -> None:
    views = full_content(PARAMS, tensor_digests(PARAMS)).views
    assert all(
        np.shares_memory(np.frombuffer(view, np.uint8), PARAMS[name]) for view, name in zip(views, "ab", strict=True)
    )


def test_a_chunk_that_differs_from_its_own_digest_is_refused_by_name() -> None:
    """Chunks in files have one."""
    manifest, pieces = published(PARAMS, 16)
    chunks = tuple(replace(c, digest=blake3(p).hexdigest()) for c, p in zip(manifest.chunks, pieces, strict=True))
    manifest = replace(manifest, chunks=chunks)
    assert params_digest(assemble(manifest, pieces)) == manifest.digest
    with pytest.raises(WeightsRefused, match="chunk 1 of policy version 3"):
        assemble(manifest, flipped(pieces, 1, 3, 0))


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"dtype": "float7_e3m3"}, "tensor a .*float7_e3m3.*upgrade ml-dtypes and rollstream"),
        ({"shape": (-2, -3)}, "tensor a .*its shape"),
    ],
)
def test_a_tensor_that_this_release_cannot_make_is_refused_and_so_ends_no_follower(
    lie: dict[str, Any], reason: str
) -> None:
    manifest, pieces = published(PARAMS, 16)
    unknown = replace(manifest, tensors=(replace(manifest.tensors[0], **lie), *manifest.tensors[1:]))
    with pytest.raises(WeightsRefused, match=reason):
        assemble(unknown, pieces)


def test_a_manifest_whose_whole_digest_is_wrong_is_refused() -> None:
    manifest, pieces = published(PARAMS, 16)
    swapped = (
        replace(manifest.tensors[0], name="b", shape=(6,)),
        replace(manifest.tensors[1], name="a"),
    )
    with pytest.raises(WeightsRefused, match="as a whole"):
        assemble(replace(manifest, tensors=swapped), pieces)


def test_a_version_is_assembled_in_the_memory_that_it_takes_and_no_more() -> None:
    manifest, stored = published({"w": np.zeros(4_000_000, np.float32)}, 1_000_000)
    tracemalloc.start()
    try:
        buffer = ContentBuffer(manifest)
        # Chunks come in any order, as from several partitions; each one is a new object, as a reader gets it.
        for chunk, data in reversed(list(zip(manifest.chunks, stored, strict=True))):
            buffer.put(chunk, bytes(bytearray(data)))
        arrays = buffer.arrays()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert arrays["w"].nbytes == 16_000_000
    assert not arrays["w"].flags.writeable
    assert peak_bytes < 20_000_000


def test_the_bytes_of_a_tensor_are_not_proved_by_another_tensor_of_its_name() -> None:
    manifest, stored = published({"a": np.zeros(5_000_000, np.float32), "b": np.ones(5_000_000, np.float32)}, 1_000_000)
    first, second = manifest.tensors
    lie = replace(first, digest=second.digest)
    digest = tree_digest([TensorDigest("a", lie.dtype, lie.shape, lie.digest)])
    buffer = ContentBuffer(replace(manifest, tensors=(replace(second, name="a"), lie), digest=digest))
    for chunk, data in zip(manifest.chunks, stored, strict=True):
        buffer.put(chunk, data)
    with pytest.raises(WeightsRefused, match="tensor a"):
        buffer.arrays()


def test_a_version_that_no_memory_holds_is_refused() -> None:
    manifest, _stored = published({"w": np.zeros(4, np.float32)}, 100)
    with pytest.raises(WeightsRefused, match="needs 1125899906842624 bytes of memory"):
        ContentBuffer(replace(manifest, chunks=(replace(manifest.chunks[0], size_bytes=2**50),)))


@pytest.mark.parametrize(("order", "flipped_byte"), [(1, None), (-1, None), (1, 20_000_000), (-1, 39_000_000)])
def test_large_tensors_are_digested_as_they_arrive_and_any_bit_changed_is_refused(
    order: int, flipped_byte: int | None
) -> None:
    """The second tensor begins within a chunk."""
    large = np.arange(9_000_000, dtype="<u4")
    params = {"a": large, "b": large[:1_500_000], "c": np.zeros(0, "<f4"), "d": large[:3]}
    manifest, stored = published(params, 1_000_000)
    if flipped_byte is not None:
        index, at = divmod(flipped_byte, 1_000_000)
        stored = flipped(stored, index, at, 3)
    buffer = ContentBuffer(manifest)
    for chunk, data in list(zip(manifest.chunks, stored, strict=True))[::order]:
        buffer.put(chunk, data)
    if flipped_byte is not None:
        place = (
            r"tensor a of .* 36 chunks, from chunk 0 \(offset .*\) to chunk 35 \("
            if flipped_byte < 36_000_000
            else r"tensor b of .* in chunk 36 \(offset .*\), chunk 37 \(.*, chunk 41 \("
        )
        with pytest.raises(WeightsRefused, match=place):
            buffer.arrays()
        return
    assert params_digest(buffer.arrays()) == manifest.digest
