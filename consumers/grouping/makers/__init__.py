"""Batch makers: the interface, the makers that ship, and the registry of names in a configuration."""
