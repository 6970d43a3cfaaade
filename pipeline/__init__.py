"""Runs rollstream: configuration, supervisor, command line, ledger, verification, demo."""
