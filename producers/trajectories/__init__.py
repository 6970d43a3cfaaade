"""Writers of trajectories of control tasks: collect chunk steps from running environments, and send trajectories."""
