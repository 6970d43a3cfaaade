"""Rollouts from code outside rollstream: draw numbers from the newest policy, score them, and write whole groups.

Arguments: servers, run.
"""

import sys

import numpy as np

from rollstream import KafkaConfig, Rollout, RolloutProducer, WeightsFollower

kafka, run = KafkaConfig(bootstrap_servers=sys.argv[1]), sys.argv[2]
QUESTION, RIGHT = 10, 7  # token 10 is the question; any token is an answer, and the nearer to 7, the better

with WeightsFollower(kafka, run) as weights, RolloutProducer(kafka, run) as producer:
    version, arrays = weights.wait_for(0, timeout_s=60)
    logits = arrays["logits"][QUESTION]
    probabilities = np.exp(logits) / np.exp(logits).sum()
    draw = np.random.default_rng(version)
    for group in range(64):
        for member in range(4):
            answer = int(draw.choice(11, p=probabilities))
            producer.send(
                Rollout(
                    uid=f"guess-{version}-{group}-{member}",
                    group_size=4,
                    environment="guess",
                    example_id=f"question-{group}",
                    policy_version=version,
                    lowest_version=version,
                    highest_version=version,
                    tokens=np.array([QUESTION, answer], np.int32),
                    loss_mask=np.array([False, True]),
                    logprobs=np.array([0.0, np.log(probabilities[answer])], np.float32),
                    reward=1.0 - abs(answer - RIGHT) / 10,
                )
            )
