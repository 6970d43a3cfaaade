"""Tools that ask the log of a run: each reads topics, none needs a role to be running."""
