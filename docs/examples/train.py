"""A bigram policy trained from a run's batches, without JAX. Arguments: servers, run, steps.

The last version that the program published is its checkpoint. The program may be ended at any moment: when it is
started again, it continues there, so it trains on each batch exactly once.
"""

import sys

import numpy as np

from rollstream import BatchReader, KafkaConfig, StepWriter, WeightsFollower

kafka, run = KafkaConfig(bootstrap_servers=sys.argv[1]), sys.argv[2]

with StepWriter(kafka, run) as steps, WeightsFollower(kafka, run) as weights:
    logits = weights.wait_for(steps.version, timeout_s=60)[1]["logits"].copy()  # of each token, given the one before
    with BatchReader(kafka, run, start=steps.position) as reader:
        while steps.step < int(sys.argv[3]):
            read = reader.poll(timeout_s=60)
            if read is None:
                sys.exit("no further batch within a minute")
            gradient, better = np.zeros_like(logits), []
            for example in read.examples():
                at = np.flatnonzero(example.loss_mask)
                before, token, advantage = example.tokens[at - 1], example.tokens[at], example.advantage[at]
                policy = np.exp(logits[before]) / np.exp(logits[before]).sum(axis=1, keepdims=True)
                chosen = policy[np.arange(len(at)), token]
                weight = advantage * np.minimum(chosen / np.exp(example.generator_log_probs[at]), 2.0)
                np.add.at(gradient, (before, token), weight)
                np.add.at(gradient, before, -weight[:, None] * policy)
                better.extend(chosen[advantage > 0])
            logits += 20 * gradient / read.entry.trained_tokens
            probability = float(np.mean(better))
            # The step, the use of its batch and its policy version are on the log together, or none of them is.
            steps.record(
                [read], {"logits": logits}, metrics={"probability": probability}, oldest_checkpoint=steps.step + 1
            )
            print(f"batch {read.entry.batch_id}: tokens of positive advantage had probability {probability:.3f}")
