"""The JAX learner: input, training, records and parallelism."""
