"""Labeling: trajectories that wait for their rewards pass through a labeler, exactly once."""
