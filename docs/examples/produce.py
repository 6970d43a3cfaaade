"""Rollouts from foreign code: guess a number, score the guess, write whole groups. Arguments: servers, run."""

import random
import sys

import numpy as np

from producers.rollout_producer import RolloutProducer
from topics.config import KafkaConfig
from topics.records import Rollout

with RolloutProducer(KafkaConfig(bootstrap_servers=sys.argv[1]), run=sys.argv[2]) as producer:
    for group in range(8):
        for member in range(4):
            guess = random.Random(f"{group} {member}").randrange(10)
            producer.send(
                Rollout(
                    uid=f"guess-{group}-{member}",
                    group_size=4,
                    environment="guess",
                    example_id=f"number-{group}",
                    policy_version=0,
                    lowest_version=0,
                    highest_version=0,
                    tokens=np.array([10, guess], np.int32),  # 10 asks; the digit answers
                    loss_mask=np.array([False, True]),
                    logprobs=np.log([1.0, 0.1]).astype(np.float32),
                    reward=float(guess == group),
                )
            )
