"""Tools that query the log of a run: each reads topics, and none needs a role to be running."""
