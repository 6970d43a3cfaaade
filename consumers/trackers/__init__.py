"""Trackers: places outside the log, such as trackio, that are filled with a learner's steps and traces of rollouts."""
