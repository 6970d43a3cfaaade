"""Rescores a run: another verifier's rewards for its rollouts, and what follows for batches, steps and versions."""
