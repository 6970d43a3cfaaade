"""Who writes trajectories of control tasks: what collects them from running environments, and what sends them."""
