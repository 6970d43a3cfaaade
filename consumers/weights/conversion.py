"""The form in which a learner's parameters are published: floating-point parameters in another dtype."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.records.arrays import dtype_of

_FLOATS = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16"}


def converted(arrays: Mapping[str, NDArray[Any]], dtype: str) -> Mapping[str, NDArray[Any]]:
    """Return the parameters, with float64 and float32 arrays converted to `dtype`; the same mapping if none changes.

    Values are rounded to the nearest, ties to even. float64 becomes bfloat16 by way of float32, so such values are
    rounded twice.
    """
    wanted = dtype_of(_FLOATS[dtype])
    changing = {name for name, array in arrays.items() if array.dtype.kind == "f" and array.dtype.itemsize >= 4}
    changing = {name for name in changing if arrays[name].dtype != wanted}
    if not changing:
        return arrays
    # Values beyond the range of a float16 become infinite there, as in any engine that loads them.
    with np.errstate(over="ignore"):
        return {name: array.astype(wanted) if name in changing else array for name, array in arrays.items()}
