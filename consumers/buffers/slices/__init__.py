"""The episode slice buffer: slices of one length from episodes of any length."""
