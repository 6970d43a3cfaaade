"""Flow control: which group a worker begins next, and how far it may run ahead of the learner."""
