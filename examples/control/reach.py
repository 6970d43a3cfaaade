"""The task: an agent on a grid walks to a target. The module has the environment, its expert and its labeler `judge`.

Rewards depend on observations alone, so that either the environment or a labeler can compute them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rollstream import Trajectory

SIDE = 8
"""Cells along a side of the grid."""
PIXELS = 2
"""Pixels along a side of a cell."""
MAX_STEPS = 24
MOVES = np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])

Observation = dict[str, NDArray[Any]]


class Reach(gymnasium.Env[Any, Any]):
    """Walk to the target: five moves, 24 steps at most. Observations are four numbers, or an image of 16x16 pixels."""

    def __init__(self, *, image: bool = False) -> None:
        side = SIDE * PIXELS
        seen = {
            "image": gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8),
            "state": gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32),
        }
        self._name = "image" if image else "state"
        self.observation_space = gymnasium.spaces.Dict({self._name: seen[self._name]})
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self._agent = self._target = np.zeros(2, np.int64)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Put agent and target on two different cells."""
        super().reset(seed=seed)
        one, other = self.np_random.choice(SIDE * SIDE, 2, replace=False)
        self._agent, self._target = np.array(divmod(one, SIDE)), np.array(divmod(other, SIDE))
        self._steps = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move by one cell, or stay; the edge of the grid stops a move."""
        before = self._seen()
        self._agent = np.clip(self._agent + MOVES[action], 0, SIDE - 1)
        self._steps += 1
        after = self._seen()
        reached = bool((self._agent == self._target).all())
        return after, float(rewards(before, after)), reached, self._steps >= MAX_STEPS and not reached, {}

    def _seen(self) -> Observation:
        if self._name == "state":
            return {"state": (np.concatenate([self._agent, self._target]) / (SIDE - 1)).astype(np.float32)}
        image = np.zeros((SIDE, PIXELS, SIDE, PIXELS, 3), np.uint8)
        image[self._agent[0], :, self._agent[1], :, 0] = 255
        image[self._target[0], :, self._target[1], :, 1] = 255
        return {"image": image.reshape(SIDE * PIXELS, SIDE * PIXELS, 3)}


def cells(seen: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of agent and target, each [..., 2], from observations [..., 4] or [..., 16, 16, 3]."""
    if "state" in seen:
        places = np.rint(seen["state"] * (SIDE - 1)).astype(np.int64)
        return places[..., :2], places[..., 2:]
    grid = seen["image"][..., ::PIXELS, ::PIXELS, :]
    flat = grid.reshape(*grid.shape[:-3], SIDE * SIDE, 3)
    agent, target = (np.stack(np.divmod(flat[..., channel].argmax(-1), SIDE), -1) for channel in (0, 1))
    return agent, target


def rewards(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return 1 for the target, plus 0.1 for each cell nearer to it, less 0.05 a step: [...] from [..., *]."""
    left = []
    for seen in (before, after):
        agent, target = cells(seen)
        left.append(np.abs(agent - target).sum(-1))
    gained: NDArray[np.float32] = ((left[1] == 0) + 0.1 * (left[0] - left[1]) - 0.05).astype(np.float32)
    return gained


def judge(trajectory: Trajectory) -> Trajectory:
    """The labeler: computes the rewards of a trajectory from the observations before and after each step."""
    seen = trajectory.arrays
    return replace(trajectory, arrays={**seen, "rewards": rewards(seen["curr_obs"], seen["next_obs"])})


def expert(seen: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Return the best moves [B] for observations [B, ...], along the axis of the longer distance first."""
    agent, target = cells(seen)
    way = target - agent
    axis = np.abs(way).argmax(-1)
    forward = np.take_along_axis(way, axis[..., None], -1)[..., 0] > 0
    return np.where((way == 0).all(-1), 0, 1 + 2 * axis + ~forward)
