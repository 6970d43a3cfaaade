"""How costs grow with open groups and partitions, as slopes; none may exceed its bound."""
