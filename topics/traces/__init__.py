"""Traces of a run: ids computed from records, and spans that are sent to a collector if one is configured."""
