"""Compression of weights: only where it pays, and back to the same bytes."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.weights.compression import NotCompressed, compress, decompress, pays

RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal(500_000).astype("<f4")


@given(st.binary(max_size=200))
def test_content_comes_back_as_it_was(content: bytes) -> None:
    assert decompress(compress(content), len(content)) == content


@given(st.binary(max_size=100), st.integers(0, 200))
def test_bytes_of_unknown_origin_are_content_of_that_size_or_refused(stored: bytes, size: int) -> None:
    with contextlib.suppress(NotCompressed):
        assert len(decompress(stored, size)) == size


@pytest.mark.parametrize("size", [9_999, 10_001])
def test_content_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(NotCompressed, match=f"zstd of {size} bytes"):
        decompress(compress(bytes(10_000)), size)


def test_random_parameters_are_not_worth_it_and_sparse_ones_are() -> None:
    sparse = np.where(RNG.random(NOISE.size) < 0.1, NOISE, 0).astype("<f4")
    assert not pays([memoryview(NOISE.view(np.uint8))])
    assert pays([memoryview(sparse.view(np.uint8))])
    assert not pays([])


def test_the_sample_is_of_the_whole_and_not_of_its_beginning() -> None:
    zeros = np.zeros(60_000, np.uint8)
    assert not pays([memoryview(zeros), memoryview(NOISE.view(np.uint8))])
