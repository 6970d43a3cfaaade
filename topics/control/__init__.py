"""Decisions of operators about a run, on its topic `control`."""
