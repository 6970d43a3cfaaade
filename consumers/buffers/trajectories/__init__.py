"""The trajectory buffer: [T, B, ...] trajectories, drawn from a window of the newest ones."""
