"""Computes how many partitions, processes and brokers a run needs, from measured rates."""
