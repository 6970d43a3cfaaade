"""Traces of a run: ids that follow from what records say, and spans that go to a collector if one is configured."""
