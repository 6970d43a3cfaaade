"""Brokers from Kafka's jars on this machine."""
