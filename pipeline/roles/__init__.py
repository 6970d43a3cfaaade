"""The roles of a run: one module for each kind of process that the supervisor starts and drains."""
