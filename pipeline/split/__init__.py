"""Splits a run: it goes on as another run with another number of partitions."""
