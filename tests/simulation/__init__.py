"""A deterministic simulation of grouping processes over a model of Kafka: one seed, one schedule."""
