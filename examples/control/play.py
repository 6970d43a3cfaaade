"""The player of a collecting process: it plays several environments at once with the newest weights.

The expert, who represents a human, takes over every fourth episode. Process 0 computes its rewards; the other processes
leave them to the labeler.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from policy import Parameters, values
from reach import MOVES, Observation, Reach, expert

from rollstream import ChunkStepResult, Seat, StateManager

WIDTH = 4
"""Number of environments played at once."""
EXPLORE = 0.1
TAKEN_OVER = 4
"""The expert plays one episode out of this many."""
AHEAD = 6
"""Trajectories of one policy version, after which the player waits for the next version, so as not to outrun the
learner."""


class Players:
    """Environments played at once, each reset when its episode is over."""

    def __init__(self, seed: int, ordinal: int, *, image: bool, knows_rewards: bool) -> None:
        self._rng = np.random.default_rng([seed, ordinal])
        self._knows_rewards = knows_rewards
        self._environments = [Reach(image=image) for _ in range(WIDTH)]
        self._seen = [e.reset(seed=int(self._rng.integers(2**31)))[0] for e in self._environments]
        self._episodes = np.arange(WIDTH)
        """Number of the current episode of each environment, which decides whether the expert plays it."""

    def step(self, version: int, parameters: Parameters) -> ChunkStepResult:
        """Make one step in every environment."""
        before = _stacked(self._seen)
        human = self._episodes % TAKEN_OVER == TAKEN_OVER - 1
        actions = np.where(human, expert(before), self._explored(values(parameters, before).argmax(-1)))
        took = [e.step(int(action)) for e, action in zip(self._environments, actions, strict=True)]
        after, rewards, terminations, truncations = (list(column) for column in list(zip(*took, strict=True))[:4])
        over = np.logical_or(terminations, truncations)
        self._episodes[over] += 1
        self._seen = [e.reset()[0] if o else a for e, o, a in zip(self._environments, over, after, strict=True)]
        return ChunkStepResult(
            actions=actions.astype(np.int32),
            rewards=np.array(rewards, np.float32) if self._knows_rewards else None,
            terminations=np.array(terminations),
            truncations=np.array(truncations),
            curr_obs=before,
            next_obs=_stacked(after),
            versions=np.where(human, -1, version),
            intervene_flags=human,
            control_modes=human.astype(np.int64),
            model_weights_id=f"v{version}",
        )

    def _explored(self, actions: NDArray[Any]) -> NDArray[Any]:
        others = self._rng.integers(len(MOVES), size=WIDTH)
        return np.where(self._rng.random(WIDTH) < EXPLORE, others, actions)


def _stacked(seen: list[Observation]) -> Observation:
    return {name: np.stack([one[name] for one in seen]) for name in seen[0]}


def play(seat: Seat) -> Generator[ChunkStepResult | None]:
    """Play until closed; yield one step of all environments at a time, or None while waiting for the next version."""
    image = seat.options.get("image") == "true"
    players = Players(seat.seed, seat.ordinal, image=image, knows_rewards=seat.ordinal == 0)
    version, played = -1, 0
    parameters: Parameters = {}
    with StateManager(seat.kafka, seat.run) as weights:
        while True:
            if (state := weights.get_state(version)) is not None:
                (version, parameters), played = state, 0
            if version < 0 or played == AHEAD * seat.steps:
                yield None
            else:
                yield players.step(version, parameters)
                played += 1
