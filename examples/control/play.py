"""A worker: plays environments side by side by the newest weights, and writes trajectories to the log.

Every fourth episode is taken over by the expert, who stands for a human. Worker 0 knows its rewards; the others leave
them to the labeler.
"""

import argparse
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from policy import Parameters, values
from reach import MAX_STEPS, MOVES, Observation, Reach, expert

from consumers.weights.state_manager import StateManager
from pipeline.process import announce_ready, stop_on_signals, watch_lifeline
from producers.trajectories.collector import TrajectoryCollector
from producers.trajectories.producer import TrajectoryProducer
from producers.trajectories.steps import ChunkStepResult
from topics.config import KafkaConfig

WIDTH = 4
"""Environments side by side."""
STEPS = 20
"""Steps of a trajectory."""
EXPLORE = 0.1
TAKEN_OVER = 4
"""Of so many episodes the expert plays one."""
AHEAD = 6
"""Trajectories of one policy version: then the worker waits for the next, so that it does not outrun the learner."""


class Players:
    """Environments side by side, each reset when its episode is over."""

    def __init__(self, seed: int, ordinal: int, *, image: bool, knows_rewards: bool) -> None:
        self._rng = np.random.default_rng([seed, ordinal])
        self._knows_rewards = knows_rewards
        self._environments = [Reach(image=image) for _ in range(WIDTH)]
        self._seen = [e.reset(seed=int(self._rng.integers(2**31)))[0] for e in self._environments]
        self._episodes = np.arange(WIDTH)
        """Number of the episode that is going on, of each: they take their turns with the expert."""

    def step(self, version: int, parameters: Parameters) -> ChunkStepResult:
        """One step of all of them."""
        before = _stacked(self._seen)
        human = self._episodes % TAKEN_OVER == TAKEN_OVER - 1
        actions = np.where(human, expert(before), self._explored(values(parameters, before).argmax(-1)))
        took = [e.step(int(action)) for e, action in zip(self._environments, actions, strict=True)]
        after, rewards, terminations, truncations = (list(of) for of in list(zip(*took, strict=True))[:4])
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


def main() -> None:
    """Play until told to stop."""
    watch_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap_servers")
    parser.add_argument("run")
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--image", action="store_true")
    args = parser.parse_args()
    stop = stop_on_signals()
    kafka = KafkaConfig(bootstrap_servers=args.bootstrap_servers)
    knows_rewards = args.ordinal == 0
    players = Players(args.seed, args.ordinal, image=args.image, knows_rewards=knows_rewards)
    with (
        StateManager(kafka, args.run) as weights,
        TrajectoryProducer(kafka, args.run, topic="trajectories" if knows_rewards else "unlabelled") as producer,
    ):
        collector = TrajectoryCollector(
            "reach",
            WIDTH,
            worker_id=f"play-{args.ordinal}",
            steps=STEPS,
            max_bytes=producer.limit_bytes,
            max_episode_length=MAX_STEPS,
        )
        announce_ready()
        version, sent = -1, 0
        parameters: Parameters = {}
        while not stop.is_set():
            if (state := weights.get_state(version)) is not None:
                (version, parameters), sent = state, 0
            if version < 0 or sent == AHEAD:
                producer.poll()
                time.sleep(0.005)
            elif (trajectory := collector.add(players.step(version, parameters))) is not None:
                producer.send(trajectory)
                sent += 1
        if (rest := collector.finish()) is not None:
            producer.send(rest)


if __name__ == "__main__":
    main()
