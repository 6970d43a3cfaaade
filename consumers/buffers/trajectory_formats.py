"""The files a trajectory may be kept in: npz (the default), pt (torch, weights only), pkl (only for who asks for it).

npz is chosen because its rows can be mapped and gathered without reading the rest, and because loading it runs nothing.
pt and pkl are the forms of RLinf's buffers, and read what those wrote. torch is imported only for pt.
"""

import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from consumers.buffers import trajectory_npz
from consumers.buffers.files import StoreError
from consumers.buffers.trajectory_rows import Checked
from topics.arrays import dtype_name
from topics.errors import ConfigurationError, RecordError
from topics.records import EpisodeSpan, RolloutMetadata
from topics.trajectories import Trajectory, flatten, nest

DEFAULT = "npz"
_ABOUT = "rollstream"
"""Key of what a trajectory is, as JSON, in pt and pkl files; RLinf's have none."""


class Format(Protocol):
    """One kind of file."""

    suffix: str
    mapped: bool
    """Whether arrays that were read cost no memory of their own: the system has the file's pages."""

    def check(self, trajectory: Checked) -> None:
        """Raise RecordError for what the format cannot hold."""

    def write(self, file: BinaryIO, trajectory: Checked) -> None:
        """Write a trajectory that was checked."""

    def read(self, path: Path) -> Trajectory:
        """Read one; its arrays are not to be written to. Raises FileNotFoundError, and StoreError for anything else."""

    def arrays(self, path: Path) -> dict[str, NDArray[Any]]:
        """Read the arrays of one, [T, B, ...] by path, and raise as `read`."""


def format_named(name: str, *, allow_pickle: bool = False) -> Format:
    """A format. Raises ConfigurationError for one that is unknown, not installed, or not asked for in so many words."""
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
                "a pkl file runs whatever its writer put into it when it is loaded; pass allow_pickle=True where you "
                "trust who wrote it, or use npz"
            )
        return _Pickle()
    raise ConfigurationError(f"trajectories have no format {name!r}; give npz, pt or pkl")


def about(trajectory: Trajectory) -> dict[str, Any]:
    """Everything of a trajectory but its arrays, as JSON."""
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory) if f.name != "arrays"}
    return {
        **fields,
        "episodes": [dataclasses.asdict(span) for span in trajectory.episodes],
        "metadata": dataclasses.asdict(trajectory.metadata),
        "extra": dict(trajectory.extra),
    }


def trajectory_of(said: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Trajectory:
    """The trajectory of what `about` gave. Raises TypeError, KeyError and RecordError for what it did not give."""
    return Trajectory(
        **{
            **said,
            "arrays": nest(arrays),
            "episodes": tuple(EpisodeSpan(**span) for span in said["episodes"]),
            "metadata": RolloutMetadata(**said["metadata"]),
        }
    )


class _Npz:
    suffix = ".npz"
    mapped = True

    def check(self, trajectory: Checked) -> None:
        trajectory_npz.check(trajectory.arrays)

    def write(self, file: BinaryIO, trajectory: Checked) -> None:
        trajectory_npz.write(file, about(trajectory.trajectory), trajectory.arrays)

    def read(self, path: Path) -> Trajectory:
        said, arrays = trajectory_npz.read(path)
        return _whole(path, said, arrays)

    def arrays(self, path: Path) -> dict[str, NDArray[Any]]:
        return trajectory_npz.read(path)[1]


class _Torch:
    suffix = ".pt"
    mapped = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def check(self, trajectory: Checked) -> None:
        _document(trajectory, lambda array: self._tensor(array[:0]))

    def write(self, file: BinaryIO, trajectory: Checked) -> None:
        self._torch.save(_document(trajectory, self._tensor), file)

    def read(self, path: Path) -> Trajectory:
        try:
            document = self._torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise StoreError(f"{path} holds no tensors alone ({error}); it is not loaded") from error
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
            raise RecordError(f"torch has no tensors of {array.dtype}; keep such trajectories as npz") from error


class _Pickle:
    suffix = ".pkl"
    mapped = False

    def check(self, trajectory: Checked) -> None:
        _document(trajectory, lambda array: array)

    def write(self, file: BinaryIO, trajectory: Checked) -> None:
        pickle.dump(_document(trajectory, np.asarray), file)

    def read(self, path: Path) -> Trajectory:
        with open(path, "rb") as file:
            try:
                document = pickle.load(file)
            except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
                raise StoreError(f"{path} cannot be unpickled ({error})") from error
        return _of_document(path, document)

    def arrays(self, path: Path) -> dict[str, NDArray[Any]]:
        return flatten(self.read(path).arrays)


def _document(trajectory: Checked, leaf: Any) -> dict[str, Any]:
    """What RLinf's files hold, and ours besides."""
    of = trajectory.trajectory
    said = {
        "max_episode_length": of.max_episode_length,
        "model_weights_id": of.model_weights_id,
        _ABOUT: json.dumps(about(of)),
    }
    document = nest({path: leaf(array) for path, array in trajectory.arrays.items()})
    for name in said:
        if name in document:
            raise RecordError(f"an array cannot be called {name!r} in this format; rename it, or use npz")
    return {**document, **said}


def _of_document(path: Path, document: Any) -> Trajectory:
    if not isinstance(document, Mapping):
        raise StoreError(f"{path} holds a {type(document).__name__} and no trajectory")
    arrays = {}
    for name, leaf in flatten({key: value for key, value in document.items() if key != _ABOUT}).items():
        array = _array(leaf)
        # RLinf's have None for fields that are not used, and numbers and texts that are no arrays.
        if array is not None and array.ndim >= 2:
            arrays[name] = array
    said = document.get(_ABOUT)
    if isinstance(said, str):
        return _whole(path, json.loads(said), arrays)
    return Trajectory(
        arrays=nest(arrays),
        uid=path.stem,
        model_weights_id=str(document.get("model_weights_id") or ""),
        max_episode_length=int(document.get("max_episode_length") or 0),
    )


def _array(leaf: Any) -> NDArray[Any] | None:
    """A tensor or an array as an array, None for anything else."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if not hasattr(leaf, "numpy"):
        return None
    leaf = leaf.detach()
    try:
        return np.asarray(leaf.numpy())
    except TypeError:  # bfloat16 and float8: numpy knows them by the names of ml_dtypes
        import ml_dtypes
        import torch

        bits = {1: torch.uint8, 2: torch.uint16}[leaf.element_size()]
        name = str(leaf.dtype).removeprefix("torch.")
        extended: NDArray[Any] = leaf.view(bits).numpy().view(getattr(ml_dtypes, name))
        return extended


def _whole(path: Path, said: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Trajectory:
    try:
        return trajectory_of(said, arrays)
    except (TypeError, KeyError, RecordError) as error:
        raise StoreError(f"{path} is no trajectory of ours ({error!r}); restore it") from error
