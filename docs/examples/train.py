"""A bigram policy trained from a run's batches, without JAX. Arguments: servers, run, batches."""

import sys

import numpy as np

from consumers.batch_reader import BatchReader
from topics.config import KafkaConfig

VOCABULARY = 11
logits = np.zeros((VOCABULARY, VOCABULARY))  # of a token, given the one before it

with BatchReader(KafkaConfig(bootstrap_servers=sys.argv[1]), run=sys.argv[2]) as reader:
    for _ in range(int(sys.argv[3])):
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
        print(f"batch {read.entry.batch_id}: tokens of positive advantage had probability {np.mean(better):.3f}")
