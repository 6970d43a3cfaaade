"""Trajectories in which every value names its source, for tests of buffers."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.topics.records import RolloutMetadata
from rollstream.topics.wire.trajectory_arrays import Trajectory, flatten

STATE = 3


def trajectory(number: int, steps: int = 4, width: int = 2, *, weights: str = "w", **fields: Any) -> Trajectory:
    """Trajectory `number`: each value of row (t, b) is number * 1000 + t * width + b, in every array but dones."""
    rows = (number * 1000 + np.arange(steps * width)).reshape(steps, width)
    arrays = {
        "rewards": rows.astype("<f4"),
        "prev_logprobs": rows.astype("<f8"),
        "dones": np.zeros((steps + 1, width), bool),
        "curr_obs": {"state": np.repeat(rows[..., None], STATE, axis=2).astype("<i4")},
    }
    return Trajectory(
        **{
            "arrays": arrays,
            "environment": "env",
            "uid": f"{number:032x}",
            "model_weights_id": weights,
            "max_episode_length": 80,
            "metadata": RolloutMetadata(worker_id=f"worker {number}"),
            **fields,
        }
    )


def untorn(sample: dict[str, Any], count: int) -> list[int]:
    """The rows of a sample by their values; checks that all arrays agree."""
    rows = sample["rewards"].astype(int)
    assert rows.shape == (count,)
    np.testing.assert_array_equal(sample["prev_logprobs"].astype(int), rows)
    np.testing.assert_array_equal(sample["curr_obs"]["state"], np.repeat(rows[:, None], STATE, axis=1))
    assert sample["dones"].shape == (count,)
    return [int(row) for row in rows]


def same(actual: Trajectory, expected: Trajectory) -> None:
    """Assert that two trajectories are equal bit for bit."""
    for name in ("uid", "environment", "policy_version", "model_weights_id", "max_episode_length", "episodes"):
        assert getattr(actual, name) == getattr(expected, name)
    assert (actual.metadata, dict(actual.extra)) == (expected.metadata, dict(expected.extra))
    ours, theirs = flatten(actual.arrays), flatten(expected.arrays)
    assert set(ours) == set(theirs)
    for path, array in theirs.items():
        assert ours[path].dtype == array.dtype, path
        assert ours[path].shape == array.shape, path
        assert ours[path].tobytes() == np.ascontiguousarray(array).tobytes(), path


def foreign(directory: Path, documents: dict[int, dict[str, Any]], name: str = "trajectory_index.json") -> None:
    """A directory as RLinf writes it, in its format pkl, with arrays for tensors."""
    import json

    directory.mkdir(parents=True)
    index = {}
    for number, document in documents.items():
        weights = document.get("model_weights_id", "")
        (directory / f"trajectory_{number}_{weights}.pkl").write_bytes(pickle.dumps(document))
        shape = document["rewards"].shape
        index[str(number)] = {
            "num_samples": shape[0] * shape[1],
            "trajectory_id": number,
            "max_episode_length": document.get("max_episode_length", 0),
            "shape": list(shape),
            "model_weights_id": weights,
        }
    listed = {"trajectory_index": index, "trajectory_id_list": list(documents)}
    (directory / name).write_text(json.dumps(listed))
    metadata = {
        "trajectory_format": "pkl",
        "size": len(documents),
        "total_samples": sum(entry["num_samples"] for entry in index.values()),
        "trajectory_counter": max(documents, default=-1) + 1,
        "seed": 77,
    }
    (directory / "metadata.json").write_text(json.dumps(metadata))
