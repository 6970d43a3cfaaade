"""The digest that identifies the parameters of a policy: in steps records, manifests and learners."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollstream.topics.arrays import dtype_name, little_endian_bytes


def params_digest(params: Mapping[str, Any]) -> str:
    """sha256, hexadecimal, over each parameter's name, dtype, shape and little-endian bytes in name order."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = np.asarray(params[name])
        digest.update(f"{name}\0{dtype_name(array.dtype)}\0{list(array.shape)}\0".encode())
        digest.update(little_endian_bytes(array))
    return digest.hexdigest()
