"""The learner: it learns off-policy from two buffers, which one reader fills from one log.

It draws single steps from windows of trajectories, and short sequences of steps from slices of episodes, half of which
the expert played. The state manager sends the weights back to the workers.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from dqn import OPTIMIZER, needed, update
from policy import Parameters, initial, values
from reach import Reach
from returns import Returns

from rollstream import (
    DeadlineExceeded,
    HilEpisodeBuffer,
    KafkaConfig,
    StateManager,
    TrajectoryFiller,
    TrajectoryReplayBuffer,
)

WINDOW_STEPS = 128
SLICES = 16
SLICE_STEPS = 4
UPDATES_A_VERSION = 50
TRAJECTORIES_A_VERSION = 10
"""Trajectories that must arrive for each version before learning goes on: somewhat fewer than the workers write."""
LAST_EPISODES = 20
"""Number of episodes of the last version to wait for, over which its mean return is reported."""
WAIT_S = 60.0


def evaluate(parameters: Parameters, *, image: bool, episodes: int = 64) -> float:
    """Return the mean return of episodes played without exploring, which start from the same seeds at every call."""
    total = 0.0
    for seed in range(episodes):
        environment = Reach(image=image)
        seen, over = environment.reset(seed=seed)[0], False
        while not over:
            seen, reward, terminated, truncated, _ = environment.step(int(values(parameters, seen).argmax()))
            total, over = total + reward, terminated or truncated
    return total / episodes


def wait(condition: Callable[[], object], filler: TrajectoryFiller) -> None:
    """Wait until a condition holds. Raises DeadlineExceeded, or the error that ended the filling."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        filler.check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the workers did not write enough within {WAIT_S:g} s; see their logs")
        time.sleep(0.01)


def enough(windows: TrajectoryReplayBuffer, slices: HilEpisodeBuffer, trajectories: int) -> bool:
    """Whether this many trajectories have arrived, with slices of the policy and of the expert."""
    return windows.is_ready(trajectories) and slices.auto.size() > 0 and slices.hil.size() > 0


def learn(
    first: Parameters,
    versions: int,
    windows: TrajectoryReplayBuffer,
    slices: HilEpisodeBuffer,
    filler: TrajectoryFiller,
    weights: StateManager,
) -> tuple[Parameters, int]:
    """Learn from `first`, which is version 0, to the last version; return the parameters and number of the last one."""
    fast, slow = (jax.tree.map(jnp.array, first) for _ in range(2))
    state, version = OPTIMIZER.init(fast), 0
    while version < versions:
        wait(partial(enough, windows, slices, (version + 1) * TRAJECTORIES_A_VERSION), filler)
        for _ in range(UPDATES_A_VERSION):
            drawn = needed(windows.sample(WINDOW_STEPS)), needed(slices.sample(SLICES))
            fast, slow, state = update(fast, slow, state, *drawn)
        version = weights.update_state(fast)
    return {name: np.asarray(array) for name, array in fast.items()}, version


def main() -> None:
    """Learn, publish, and write a report; print "ready" once version 0 is published."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap_servers")
    parser.add_argument("run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--image", action="store_true")
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    kafka = KafkaConfig(bootstrap_servers=args.bootstrap_servers)
    returns = Returns()
    first = initial(np.random.default_rng(args.seed), image=args.image)
    with (
        TrajectoryReplayBuffer(
            args.seed, cache_size=50, sample_window_size=200, auto_save=True, auto_save_path=args.data / "windows"
        ) as windows,
        HilEpisodeBuffer(
            args.data / "slices",
            capacity=100_000,
            slice_len=SLICE_STEPS,
            strict_length=False,
            pad_output=True,
            seed=args.seed,
        ) as slices,
    ):
        identity = args.data / "topic.json"
        with (
            TrajectoryFiller(kafka, args.run, [windows, slices, returns], identity_file=identity) as filler,
            StateManager(kafka, args.run, name="dqn") as weights,
        ):
            weights.update_state(first)
            print("ready", flush=True)
            began = time.monotonic()
            last, version = learn(first, args.versions, windows, slices, filler, weights)
            wait(lambda: returns.episodes(version) >= LAST_EPISODES, filler)
        report = {
            "updates": version * UPDATES_A_VERSION,
            "versions": version + 1,
            "seconds": round(time.monotonic() - began, 1),
            "first_return": returns.mean(0),
            "last_return": returns.mean(version),
            "returns": {number: returns.mean(number) for number in range(version + 1) if returns.episodes(number)},
            "first_greedy_return": evaluate(first, image=args.image),
            "last_greedy_return": evaluate(last, image=args.image),
            "episodes": dict(returns.counts),
            "trajectories": dict(returns.trajectories),
            "refused": filler.counts.refused,
            "windows": windows.stats(),
            "slices": slices.stats(),
        }
    (args.data / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
