"""Hostile input by the million, into all that takes input and needs no broker: `python -m tests.hostile`."""
