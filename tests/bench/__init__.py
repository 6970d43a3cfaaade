"""Measurements, each as a ratio to a raw baseline measured with it; `python -m tests.bench` or `make bench` runs them.

Compare ratios between machines and days; absolute figures depend on the machine and are only reported.
"""
