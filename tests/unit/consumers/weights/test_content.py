"""Compression of weights: only where it pays, and back to the same bytes."""

import contextlib
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.weights.content import NotCompressed, compress, decompress, pays

RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal(500_000).astype("<f4")


@given(st.binary(max_size=200))
def test_content_comes_back_as_it_was(content: bytes) -> None:
    assert decompress(compress(content), len(content)) == content


@given(st.binary(max_size=100), st.integers(0, 200))
def test_bytes_of_unknown_origin_are_content_of_that_size_or_refused(stored: bytes, size: int) -> None:
    with contextlib.suppress(NotCompressed):
        assert len(decompress(stored, size)) == size


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("size", [9_999, 10_001])
def test_content_of_another_size_is_refused(size: int, declares: bool) -> None:
    stored = zstandard.ZstdCompressor(write_content_size=declares).compress(bytes(10_000))
    with pytest.raises(NotCompressed, match=rf"(instead of|not zstd of) {size}\b"):
        decompress(stored, size)


def test_a_frame_that_declares_more_takes_no_more_memory() -> None:
    stored = zstandard.compress(bytes(256 * 1024 * 1024))
    tracemalloc.start()
    try:
        with pytest.raises(NotCompressed, match="zstd of 268435456 bytes instead of 1024"):
            decompress(stored, 1024)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_bytes_after_a_frame_are_refused() -> None:
    with pytest.raises(NotCompressed, match="not zstd of 4 bytes"):
        decompress(compress(b"data") + b"more", 4)


def test_random_parameters_are_not_worth_it_and_sparse_ones_are() -> None:
    sparse = np.where(RNG.random(NOISE.size) < 0.1, NOISE, 0).astype("<f4")
    assert not pays([memoryview(NOISE.view(np.uint8))])
    assert pays([memoryview(sparse.view(np.uint8))])
    assert not pays([])


def test_the_sample_is_of_the_whole_and_not_of_its_beginning() -> None:
    zeros = np.zeros(60_000, np.uint8)
    assert not pays([memoryview(zeros), memoryview(NOISE.view(np.uint8))])
