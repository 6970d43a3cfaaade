"""Fronts of a run's topics for trainers that have interfaces of their own."""
