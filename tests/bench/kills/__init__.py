"""Loops of one shape, killed at the same moments, and a count of the rollouts that their models were trained on."""
