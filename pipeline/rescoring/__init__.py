"""Rescores a run: scores its rollouts with another verifier, and finds the effects on batches, steps and versions."""
