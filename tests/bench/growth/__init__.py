"""How costs grow: open groups, partitions, processes and the size of the log, as slopes; none may exceed a bound."""
