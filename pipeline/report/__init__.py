"""The report of a run: one file that shows what the run was, how it went, and how each claim is verified."""
