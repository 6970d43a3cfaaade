"""Names of dtypes and bytes of arrays: what is written comes back, and what no reader could verify is refused."""

import ml_dtypes
import numpy as np
import pytest

from rollstream.topics.errors import RecordError
from rollstream.topics.records import NamedArray, same
from rollstream.topics.records.arrays import dtype_name, dtype_of, little_endian_bytes

WRITTEN = [
    *("|b1", "|i1", "|u1", "<i2", "<u4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16", "|S3", "<U2", "<M8[s]", "<m8[ms]"),
    *("bfloat16", "float8_e4m3fn", "int4"),
]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_dtype_has_one_name_and_comes_back_with_its_bits(name: str) -> None:
    dtype = dtype_of(name)
    array = np.arange(6).astype(dtype).reshape(2, 3)
    assert dtype_name(dtype) == name
    assert same(NamedArray.of(array).array(), array)


def test_extension_types_are_those_of_ml_dtypes() -> None:
    assert dtype_of("bfloat16") == np.dtype(ml_dtypes.bfloat16)


def test_a_big_endian_or_strided_array_is_written_little_endian_in_c_order() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    named = NamedArray.of(array)
    assert (named.dtype, named.shape) == ("<i4", (3, 2))
    assert (
        named.data
        == little_endian_bytes(array)
        == bytes([0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0]) + bytes([4, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0])
    )


@pytest.mark.parametrize("dtype", [np.dtype(object), np.dtype([("a", "<i4")]), np.dtype("V8")])
def test_objects_structures_and_nameless_bytes_are_refused(dtype: np.dtype) -> None:
    with pytest.raises(RecordError, match="cannot be written"):
        dtype_name(dtype)


@pytest.mark.parametrize("name", ["|O", "<i3", "|V8", "<f4,<i4", "nothing", "finfo", "__name__", ""])
def test_names_of_no_dtype_are_refused(name: str) -> None:
    with pytest.raises(RecordError, match="is not a supported dtype"):
        dtype_of(name)


@pytest.mark.parametrize(("shape", "size"), [((2, 3), 23), ((2, 3), 25), ((-1, -6), 24), ((), 0)])
def test_bytes_that_are_not_those_of_a_shape_are_refused(shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(RecordError, match=r"and dtype .* has \d+ bytes"):
        NamedArray(dtype="<f4", shape=shape, data=bytes(size)).array()
