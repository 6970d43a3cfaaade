"""Attestations: what a run trained a model on, in a statement that anybody with an archive of the run can check."""
