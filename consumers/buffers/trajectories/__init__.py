"""The trajectory buffer: [T, B, ...] trajectories, drawn from the newest trajectories."""
