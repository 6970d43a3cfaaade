"""Parallel training: the device mesh, and the processes of one learner."""
