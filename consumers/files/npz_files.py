"""Files of numpy arrays by name (.npz), which `numpy.load` reads: any name is allowed, and memory holds one array."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rollstream.consumers.files.safetensors_files import Storable
from rollstream.topics.files.atomic_files import replacing


def write(path: Path, arrays: Mapping[str, Storable]) -> None:
    """Write a file atomically, one array at a time. Raises StoreError, and ValueError for an array of objects."""
    # numpy.savez takes the arrays as keyword arguments, so that names such as `file` would be taken for its own.
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # The size of a member is only known once it is written, and may exceed 4 GiB.
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
