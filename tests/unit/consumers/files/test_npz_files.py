"""Files of arrays have exactly the arrays given, whatever their names."""

from pathlib import Path

import numpy as np

from rollstream.consumers.files import npz_files


def test_arrays_are_read_back_under_any_name(tmp_path: Path) -> None:
    arrays = {
        "file": np.arange(6, dtype="<f4").reshape(2, 3),
        "allow_pickle": np.float16(1.5)[None],
        "dense/kernel": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "args": np.array(7),
        "empty": np.zeros((0, 3)),
    }
    npz_files.write(tmp_path / "arrays.npz", arrays)
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as stored:
        read = dict(stored)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)
