"""Gives trajectories that wait for their rewards what a labeler makes of them, exactly once."""
