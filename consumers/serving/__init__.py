"""Keeps third-party inference engines on the newest policy version: checkpoints on disk, an updater for each engine."""
