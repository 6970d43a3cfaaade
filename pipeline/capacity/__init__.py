"""How many partitions, processes and brokers a run needs: arithmetic over rates that were measured."""
