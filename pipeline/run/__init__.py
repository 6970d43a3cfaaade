"""Runs a pipeline under one supervisor: plan, processes, live statistics, demo."""
