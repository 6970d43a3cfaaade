"""Changes of a run while it runs."""
