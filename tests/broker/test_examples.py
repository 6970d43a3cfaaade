"""The trainer of docs/examples on a real broker: it reads real batches, needs no JAX, and what paid gets likelier."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.runs import RealRun, rollout
from topics.records import Rollout

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "train.py"
PROMPT, RIGHT = 10, 7


def guess(group: int, member: int, digit: int) -> Rollout:
    """One answer to a prompt of one token, by a policy that draws each digit alike."""
    return rollout(
        f"number-{group}",
        member,
        tokens=np.array([PROMPT, digit], np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0.0, np.log(0.1)], np.float32),
        reward=float(digit == RIGHT),
    )


def test_the_trainer_in_numpy_makes_rewarded_tokens_likelier_batch_by_batch(real_run: RealRun) -> None:
    real_run.topics = type(real_run.topics)(partitions=1)
    real_run.prepare()
    real_run.start("group")
    rng = np.random.default_rng(5)
    wrong = [digit for digit in range(10) if digit != RIGHT]
    real_run.send(
        guess(group, member, RIGHT if member == 0 else int(rng.choice(wrong)))
        for group in range(16)
        for member in range(4)
    )
    trained = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE, real_run.kafka.bootstrap_servers, real_run.name, "4"],
        cwd=real_run.directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    lines = re.findall(r"^batch 0-(\d): .* probability ([\d.]+)$", trained.stdout, re.MULTILINE)
    assert [int(number) for number, _probability in lines] == [0, 1, 2, 3]
    probabilities = [float(probability) for _number, probability in lines]
    assert probabilities[0] == np.round(1 / 11, 3)
    assert probabilities == sorted(set(probabilities)), "it rises with every batch"
    assert probabilities[-1] > 0.8


def test_the_trainer_is_an_example_short_enough_to_read() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 30
    assert "jax" not in source.replace("without JAX", "")
