"""Files that several consumers read and write."""
