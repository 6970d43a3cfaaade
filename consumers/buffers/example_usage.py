"""Example of the group store without Kafka: `python -m rollstream.consumers.buffers.example_usage [DIRECTORY]`.

It adds rollouts of 12 problems to a store, makes batches of them, and reads both back. The numbers that it prints come
from the files, and from the statistics of the store.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.grouping.makers.batch_maker import MakerContext
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.records import InferenceMetadata, Rollout, RolloutMetadata, Turn

PROBLEMS = 12
ATTEMPTS = 8
BATCH_SIZE = 32


def attempts() -> Iterator[Rollout]:
    """Eight attempts at each of twelve sums, each correct or wrong at random, with a fixed seed."""
    rng = np.random.default_rng(0)
    for problem in range(PROBLEMS):
        for attempt in range(ATTEMPTS):
            correct = bool(rng.random() < problem / (PROBLEMS - 1))
            tokens = np.array([problem, 10, problem, 11, 2 * problem + (not correct)], np.int32)
            uid = f"problem-{problem}-{attempt}"
            yield Rollout(
                uid=uid,
                group_size=ATTEMPTS,
                environment="sums",
                example_id=f"problem-{problem}",
                policy_version=3,
                lowest_version=3,
                highest_version=3,
                tokens=tokens,
                loss_mask=np.array([False] * 4 + [True]),
                logprobs=np.array([0, 0, 0, 0, -0.7], np.float32),
                reward=float(correct),
                turns=(
                    Turn(role="user", text=f"{problem}+{problem}=", start=0, stop=4),
                    Turn(
                        role="assistant",
                        text=str(tokens[-1]),
                        start=4,
                        stop=5,
                        reward=float(correct),
                        has_logprobs=True,
                        inference=InferenceMetadata(model_version=3, inference_time_s=0.01),
                    ),
                ),
                metadata=RolloutMetadata(worker_id="example", replica_id=f"replica-{attempt % 2}", timestamp=0.0),
            )


def main(root: Path) -> None:
    """Fill a store below `root` and print its content."""
    config = GroupStoreConfig(target_group_size=ATTEMPTS)
    maker = ReservoirBatchMaker(MakerContext(partition=0, seed=42, batch_bytes=2**30))
    with GroupReplayBuffer(root, "sums", config, batch_maker=maker) as buffer:
        buffer.add_rollouts(attempts())
        while (batch_id := buffer.create_and_store_batch(BATCH_SIZE)) is not None:
            batch = buffer.read_batch(batch_id)
            advantages = np.array([example.advantage[0] for example in batch.examples])
            _print_line(
                f"batch {batch.number}: {len(batch.examples)} examples, advantages {advantages.std():.3f} around 0"
            )
        for group in buffer.groups():
            rewards = [rollout.reward for rollout in group.rollouts]
            _print_line(f"group {group.example_id}: {len(rewards)} rollouts, mean reward {np.mean(rewards):.3f}")
        for name, count in buffer.stats().items():
            _print_line(f"{name}: {count}")
        files = sorted(path.relative_to(root) for path in root.rglob("*.parquet"))
        _print_line(f"{len(files)} files, e.g. {files[0]} and {files[-1]}")


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
