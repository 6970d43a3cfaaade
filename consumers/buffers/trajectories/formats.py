"""File formats of trajectories: npz (the default), pt (torch, weights only), and pkl (only on explicit request).

npz is the default because its rows can be mapped and gathered without reading other rows, and loading it runs no code.
pt and pkl are the formats of RLinf's buffers; files that RLinf wrote can be read. torch is imported only for pt.
"""

import dataclasses
import json
import pickle
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.trajectories import npz
from rollstream.consumers.buffers.trajectories.rows import CheckedTrajectory
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import EpisodeSpan, RolloutMetadata
from rollstream.topics.records.arrays import dtype_name
from rollstream.topics.wire.trajectory_arrays import Trajectory, flatten, nest

DEFAULT = "npz"
_ABOUT = "rollstream"
"""Key of the description of a trajectory, as JSON, in pt and pkl files; RLinf's files have none."""


class Format(Protocol):
    """One file format."""

    suffix: str
    mapped: bool
    """Whether arrays that were read are mapped pages of the file, which need no memory."""

    def check(self, trajectory: CheckedTrajectory) -> None:
        """Raise RecordError if the format cannot store the trajectory."""

    def write(self, file: BinaryIO, trajectory: CheckedTrajectory) -> None:
        """Write a checked trajectory."""

    def read(self, path: Path) -> Trajectory:
        """Read a trajectory; its arrays are read-only. Raises FileNotFoundError, or StoreError for other failures."""

    def arrays(self, path: Path) -> dict[str, NDArray[Any]]:
        """Read the arrays of a trajectory, [T, B, ...] by path. Raises the errors of `read`."""


def format_named(name: str, *, allow_pickle: bool = False) -> Format:
    """Return the format of this name. Raises ConfigurationError if it is unknown, not installed, or not allowed."""
    if name == "npz":
        return _Npz()
    if name == "pt":
        try:
            import torch
        except ImportError as error:
            raise ConfigurationError(
                "trajectories in format pt need torch, which is not installed; install it, or use npz"
            ) from error
        return _Torch(torch)
    if name == "pkl":
        if not allow_pickle:
            raise ConfigurationError(
                "loading a pkl file runs any code that its writer put into it; pass allow_pickle=True if you trust the "
                "writer, or use npz"
            )
        return _Pickle()
    raise ConfigurationError(f"trajectories have no format {name!r}; give npz, pt or pkl")


def description_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return all fields of a trajectory except its arrays, as JSON values."""
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory) if f.name != "arrays"}
    return {
        **fields,
        # Not dataclasses.asdict, which takes ten times as long.
        "episodes": [dict(vars(span)) for span in trajectory.episodes],
        "metadata": dict(vars(trajectory.metadata)),
        "extra": dict(trajectory.extra),
    }


def trajectory_of(fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Trajectory:
    """Rebuild a trajectory from its description. Raises TypeError, KeyError or RecordError if it is invalid."""
    return Trajectory(
        **{
            **fields,
            "arrays": nest(arrays),
            "episodes": tuple(EpisodeSpan(**span) for span in fields["episodes"]),
            "metadata": RolloutMetadata(**fields["metadata"]),
        }
    )


def with_plain_fields(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory, with NumPy's numbers in its fields as Python's, so that every format can write it. Raises
    RecordError if a field has a value that no file can hold."""
    try:
        fields = description_of(trajectory)
        try:
            json.dumps(fields, ensure_ascii=False).encode()
            return trajectory
        except TypeError:
            text = json.dumps(fields, ensure_ascii=False, default=methodcaller("item")).encode()
            return dataclasses.replace(trajectory_of(json.loads(text), {}), arrays=trajectory.arrays)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordError(
            f"trajectory {trajectory.uid!r} has a field that cannot be written as JSON ({error}); give numbers and "
            "texts"
        ) from error


class _Npz:
    suffix = ".npz"
    mapped = True

    def check(self, trajectory: CheckedTrajectory) -> None:
        npz.check(trajectory.arrays)

    def write(self, file: BinaryIO, trajectory: CheckedTrajectory) -> None:
        npz.write(file, description_of(trajectory.trajectory), trajectory.arrays)

    def read(self, path: Path) -> Trajectory:
        fields, arrays = npz.read(path)
        try:
            return trajectory_of(fields, arrays)
        except (TypeError, KeyError, RecordError) as error:
            raise _not_ours(path, error) from error

    def arrays(self, path: Path) -> dict[str, NDArray[Any]]:
        return npz.read(path)[1]


class _Torch:
    suffix = ".pt"
    mapped = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def check(self, trajectory: CheckedTrajectory) -> None:
        _document(trajectory, lambda array: self._tensor(array[:0]))

    def write(self, file: BinaryIO, trajectory: CheckedTrajectory) -> None:
        self._torch.save(_document(trajectory, self._tensor), file)

    def read(self, path: Path) -> Trajectory:
        try:
            document = self._torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # bytes of unknown origin can fail anywhere in the parser
            raise StoreError(
                f"{path} contains more than tensors, or is damaged ({type(error).__name__}); it is not loaded"
            ) from error
        return _of_document(path, document)

    def arrays(self, path: Path) -> dict[str, NDArray[Any]]:
        return flatten(self.read(path).arrays)

    def _tensor(self, array: NDArray[Any]) -> Any:
        torch = self._torch
        if array.dtype.kind == "V":
            kind = getattr(torch, dtype_name(array.dtype), None)
            if kind is not None and kind.itemsize == array.dtype.itemsize:
                return torch.from_numpy(array.view(f"<u{array.dtype.itemsize}").copy()).view(kind)
        try:
            return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
        except TypeError as error:
            raise RecordError(f"torch has no tensors of {array.dtype}; store such trajectories as npz") from error


class _Pickle:
    suffix = ".pkl"
    mapped = False

    def check(self, trajectory: CheckedTrajectory) -> None:
        _document(trajectory, lambda array: array)

    def write(self, file: BinaryIO, trajectory: CheckedTrajectory) -> None:
        pickle.dump(_document(trajectory, np.asarray), file)

    def read(self, path: Path) -> Trajectory:
        with open(path, "rb") as file:
            try:
                document = pickle.load(file)
            except Exception as error:  # code in the file may raise anything
                raise StoreError(f"{path} cannot be unpickled ({error})") from error
        return _of_document(path, document)

    def arrays(self, path: Path) -> dict[str, NDArray[Any]]:
        return flatten(self.read(path).arrays)


def _document(trajectory: CheckedTrajectory, leaf: Any) -> dict[str, Any]:
    """Return the fields of RLinf's files, and our description as a further field."""
    record = trajectory.trajectory
    fields = {
        "max_episode_length": record.max_episode_length,
        "model_weights_id": record.model_weights_id,
        _ABOUT: json.dumps(description_of(record)),
    }
    document = nest({path: leaf(array) for path, array in trajectory.arrays.items()})
    for name in fields:
        if name in document:
            raise RecordError(f"an array cannot be named {name!r} in this format; rename it, or use npz")
    return {**document, **fields}


def _of_document(path: Path, document: Any) -> Trajectory:
    if not isinstance(document, Mapping):
        raise StoreError(f"{path} contains a {type(document).__name__}, not a trajectory")
    arrays = {}
    for name, leaf in flatten({key: value for key, value in document.items() if key != _ABOUT}).items():
        array = _array(leaf)
        # RLinf's files also have fields that are not arrays: numbers, texts, and None for unused fields.
        if array is not None and array.ndim >= 2:
            arrays[name] = array
    try:
        fields = document.get(_ABOUT)
        if isinstance(fields, str):
            return trajectory_of(json.loads(fields), arrays)
        return Trajectory(
            arrays=nest(arrays),
            uid=path.stem,
            model_weights_id=str(document.get("model_weights_id") or ""),
            max_episode_length=int(document.get("max_episode_length") or 0),
        )
    except (TypeError, KeyError, ValueError, RecordError) as error:
        raise _not_ours(path, error) from error


def _array(leaf: Any) -> NDArray[Any] | None:
    """Return a tensor or an array as an array, and None for anything else."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if not hasattr(leaf, "numpy"):
        return None
    leaf = leaf.detach()
    try:
        return np.asarray(leaf.numpy())
    except TypeError:  # numpy lacks bfloat16 and float8, which ml_dtypes adds.
        import ml_dtypes
        import torch

        bits = {1: torch.uint8, 2: torch.uint16}[leaf.element_size()]
        name = str(leaf.dtype).removeprefix("torch.")
        extended: NDArray[Any] = leaf.view(bits).numpy().view(getattr(ml_dtypes, name))
        return extended


def _not_ours(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path} is not a trajectory of this program ({error!r}); restore it")
