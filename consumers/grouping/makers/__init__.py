"""Batch makers: the interface, the built-in makers, and the registry of the names that a configuration may use."""
