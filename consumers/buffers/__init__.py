"""Replay buffers and stores: views of the log, filled from topics and restored by position; they also work by hand."""
