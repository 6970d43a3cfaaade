"""Metrics of a process: their catalogue, their values, the topic and the text at /metrics."""
