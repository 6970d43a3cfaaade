"""Equality of records that hold arrays, for which == fails: a comparison of numpy arrays has no single truth value."""

from dataclasses import fields, is_dataclass

import numpy as np


def same(a: object, b: object) -> bool:
    """Return whether two records, or values within them, are equal: dtype, shape and bits of arrays included."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b
