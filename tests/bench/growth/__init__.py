"""Measures how costs grow with open groups, partitions, processes and the log: as slopes, each with an upper bound."""
