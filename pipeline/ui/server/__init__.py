"""The server of the page: access control, the answers about a run, and the stream of its events."""
