"""Proofs over a run's topics: ledger, verification, and pruning plans."""
