"""Splits a run, which continues as another run with another number of partitions."""
