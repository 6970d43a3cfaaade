"""The page of a run: an index of its records, a server, and the files that a browser loads."""
