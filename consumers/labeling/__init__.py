"""Labeling: trajectories and rollouts without rewards get them from a labeler, exactly once."""
