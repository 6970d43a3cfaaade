"""One module per process of a run; each is a role the supervisor starts and drains."""
