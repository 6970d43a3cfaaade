"""Tools that query the log of a run. Each reads topics, and none needs a running role."""
