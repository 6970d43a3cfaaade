"""Measurements, each as a ratio to a raw baseline of the same run; `python -m tests.bench` (or `make bench`) runs them.

Ratios are what to compare between machines and days; absolute figures drift with the machine and are only reported.
"""
