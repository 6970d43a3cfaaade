"""Runs on the schedulers that people have, started on this machine in namespaces of their own."""
