"""Gives hostile input, by the million, to all code that takes input without a broker: `python -m tests.hostile`."""
