"""Records of a learner: steps, checkpoints, metrics, and retraining from them."""
