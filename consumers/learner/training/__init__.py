"""Training step of the learner: losses, optimizer, jitted update."""
