"""Keeps inference engines of others on the newest policy version: checkpoints on disk, an updater for each engine."""
