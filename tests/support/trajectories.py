"""For tests of trajectories: small ones whose values tell which they are, and a labeler to run as a process."""

import os
import threading
from dataclasses import replace

import numpy as np

from rollstream.topics.errors import RecordError
from rollstream.topics.records import EpisodeSpan, RolloutMetadata
from rollstream.topics.wire.trajectory_arrays import Trajectory


def numbered(number: int, *, worker: str = "w0", steps: int = 4, **changes: object) -> Trajectory:
    """Trajectory `number` of a worker: each value of `actions` is the number, and there are no rewards."""
    values: dict[str, object] = {
        "arrays": {"actions": np.full((steps, 2), number, np.int64), "dones": np.zeros((steps + 1, 2), bool)},
        "environment": "cart",
        "uid": f"{worker}-{number}",
        "episodes": (EpisodeSpan(uid=f"{worker}-{number}", column=0, start=0, stop=steps),),
        "metadata": RolloutMetadata(worker_id=worker, timestamp=1.0),
    }
    return Trajectory(**(values | changes))  # type: ignore[arg-type]


def number_of(trajectory: Trajectory) -> int:
    """The number of a numbered trajectory."""
    return int(trajectory.arrays["actions"][0, 0])


def double(trajectory: Trajectory) -> Trajectory | None:
    """A labeler: the reward is twice the number. It leaves out every tenth, and refuses one of each hundred."""
    number = number_of(trajectory)
    if number % 100 == 55:
        raise RecordError(f"number {number} cannot be judged")
    if number % 10 == 0:
        return None
    rewards = 2.0 * trajectory.arrays["actions"].astype(np.float32)
    return replace(trajectory, arrays={**trajectory.arrays, "rewards": rewards})


HOLD_AT = "ROLLSTREAM_TEST_HOLD_AT"
"""A variable of the environment: the number at which `held` stops."""


def held(trajectory: Trajectory) -> Trajectory | None:
    """`double`, but for numbers of HOLD_AT or more it never returns, so that it is killed at work."""
    if number_of(trajectory) >= int(os.environ[HOLD_AT]):
        threading.Event().wait()
    return double(trajectory)


def mended(trajectory: Trajectory) -> Trajectory | None:
    """`double`, which refuses none."""
    return replace(trajectory, arrays={**trajectory.arrays, "rewards": 2.0 * trajectory.arrays["actions"]})
